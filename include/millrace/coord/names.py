"""The names of collections, for who needs no more of them: it loads neither Arrow nor a schema, and makes no file."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def collection_names(data_dir: Path) -> list[str]:
    """Of the collections that are there and not dropped, sorted; none where no coordinator was at work yet."""
    path = data_dir / "coord" / "coord.db"
    if not path.exists():
        return []
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)
        try:
            return [
                name for (name,) in db.execute("select name from collection where state != 'dropped' order by name")
            ]
        finally:
            db.close()
    except sqlite3.Error:
        return []
