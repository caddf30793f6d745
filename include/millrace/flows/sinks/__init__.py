"""Where rows go: one protocol (`sink.py`), one folder for each, one suite for all (tests/flows/sinks)."""
