"""The meta store: what the cluster agrees on. Revisioned keys, compare-and-set commits, leases, a watch that resumes."""
