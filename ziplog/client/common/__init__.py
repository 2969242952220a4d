"""What all the client's state machines share: routing, leases, requests, one step's context."""
