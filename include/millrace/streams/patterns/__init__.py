"""Row patterns: SQL's MATCH_RECOGNIZE over Arrow tables and, with the keyed state of millrace.streams.keyed, over streams (docs/patterns.md)."""
