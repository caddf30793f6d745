"""The sinks of pipelines: one protocol (`sink.py`), one folder for each, one suite for all (tests/pipelines/sinks)."""
