"""Keyed operators over streams: explicit, columnar state by shard of keys, committed together with what it answers (docs/operators.md)."""
