"""Declared streams: their definition, discovery, checks, and state over their runs (docs/declared-streams.md)."""
