"""The keyed operators: patterns, windows, joins, deduplication; each a function over columns (docs/operators.md)."""
