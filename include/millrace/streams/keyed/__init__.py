"""Keyed operators over streams: columnar state by shard of keys, committed with its answers (docs/operators.md)."""
