"""Backfill: rebuild a range of a derived table, or load files, in slices that restart independently."""
