"""Declared streams: what one is, which there are, whether one can run, and what of it is kept over its runs (docs/declared-streams.md)."""
