"""A table of MariaDB, by its binary log, as a source (docs/capture.md)."""
