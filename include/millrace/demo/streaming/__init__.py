"""``make run STREAMS=1``: streams over the flights of 2013, each answer held against DuckDB's (docs/streams.md)."""
