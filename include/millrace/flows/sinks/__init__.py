"""Sinks: one protocol (`sink.py`), one folder for each kind, one conformance suite for all (tests/flows/sinks)."""
