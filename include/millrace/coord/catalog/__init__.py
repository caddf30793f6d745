"""The catalog: its file, what a cluster shares of it, and its comparison with the chain."""
