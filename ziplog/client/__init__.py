"""The client: pure state machines, the engines that drive them, and the two public facades."""
