"""Time and keys: operators over streams, their keyed state, and row patterns (docs/operators.md)."""
