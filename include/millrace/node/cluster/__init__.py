"""A node of a cluster: its session, its assigned channels, and the orders that it executes (docs/coordinator.md)."""
