"""Players under random faults, with targets of several kinds, and a verdict on the targets."""
