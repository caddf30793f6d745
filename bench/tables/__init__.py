"""Tables as people write and read them, beside MERGE and DuckDB."""
