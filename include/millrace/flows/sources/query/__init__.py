"""Rows of a table or view, read again and again by a column that grows with each change (docs/capture-by-sql.md)."""
