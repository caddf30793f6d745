"""The meta store, which holds what the cluster agrees on: revisioned keys, compare-and-set commits, leases, a resumable
watch.
"""
