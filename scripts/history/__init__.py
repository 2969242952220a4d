"""What clients did to a log and what they saw of it: its form, and the rules that it must obey."""
