"""Recovery: find faults between log, WAL and collections, repair them, and verify the repair (docs/operating.md)."""
