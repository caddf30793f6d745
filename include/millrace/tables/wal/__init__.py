"""The `wal` table: positions at one version (`table.py`), rows in order (`reader.py`), states proved by replay."""
