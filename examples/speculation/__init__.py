"""Applications that compute on records before they are final (docs/speculation.md)."""
