"""A node of a cluster: its session, what it was assigned, the orders that it obeys (docs/coordinator.md)."""
