"""Compaction: merge small files and segments, fold deletes in, cluster files, vacuum replaced ones.

Compaction changes no row that a read may ask for, and takes no lock that the streaming jobs would wait for.
"""
