"""Backfill: a range of a derived table rebuilt, or files loaded into a collection, in slices that restart alone."""
