"""Row patterns: SQL's MATCH_RECOGNIZE over Arrow tables and, with keyed state, over streams (docs/patterns.md)."""
