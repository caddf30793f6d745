"""Rows of a table or view, polled by a column that grows with each change (docs/capture-by-sql.md)."""
