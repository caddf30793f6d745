"""Checks, computed values and defaults of a schema: a closed grammar as trees, and their column-wise evaluation."""
