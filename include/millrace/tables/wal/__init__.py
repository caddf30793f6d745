"""The `wal` table: what one version of it says (`table.py`), its rows in order (`reader.py`), states that are proved by replay."""
