"""Millrace: a streaming write-ahead log for tables."""

__version__ = "0.1.0"
