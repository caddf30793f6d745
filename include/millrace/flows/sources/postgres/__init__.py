"""A table of PostgreSQL, by logical decoding, as a source (docs/capture.md)."""
