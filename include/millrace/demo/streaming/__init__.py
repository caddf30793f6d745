"""``make run STREAMS=1``: streaming queries over the flights of 2013, each compared with DuckDB (docs/streams.md)."""
