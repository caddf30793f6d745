"""Compaction: small files and segments into larger ones, deletes folded in, files clustered, what is replaced removed.

It changes no row that a read may ask for, and takes no lock that the streaming jobs would wait for.
"""
