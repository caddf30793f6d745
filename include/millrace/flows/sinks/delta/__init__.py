"""Documents appended to a Delta table, each once."""
