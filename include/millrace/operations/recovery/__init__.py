"""Recovery: find what is wrong between log, WAL and collections, repair it, prove the repair (docs/operating.md)."""
