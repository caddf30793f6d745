"""Checks, computed values and defaults of a schema: a closed grammar as trees, and what they come to, column by column."""
