"""Removes what the tables hold durably: the log's head, and small files of `wal`. Never while a backup reads."""
