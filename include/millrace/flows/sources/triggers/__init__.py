"""Changes that triggers write into a table of the database, read in order and removed (docs/capture-by-sql.md)."""
