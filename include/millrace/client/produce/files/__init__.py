"""Rows from files, in batches, each with the line it came from and, where it does not fit, the column, the value and the reason."""
