"""Where a pipeline's documents go: one protocol (`sink.py`), a folder a sink, one suite that all of them pass (tests/pipelines/sinks)."""
