"""One process of test_publisher_kills: flushes, joins, compacts and publishes what a deployment has."""

from __future__ import annotations

import sys
from pathlib import Path

from millrace.base.settings import Settings
from millrace.node.flush.definition import flush_to_end
from millrace.node.publish.definition import publish_to_end
from millrace.operations.compaction.declaration import CompactionParams
from millrace.operations.compaction.run import compact
from millrace.storage.table import table_at
from millrace.tables.collections.data_tables import rows_uri
from millrace.tables.rewrite.fold import fold_files
from millrace.tables.rewrite.rewrite import merge_job

STEPS = ("flush", "publish", "fold", "publish", "compact", "publish")


def main(folder: str, tick: str) -> None:
    """Take the steps. `tick` is the one up to which the log has everything."""
    settings = Settings(data_dir=Path(folder))
    for step in STEPS:
        match step:
            case "flush":
                flush_to_end(settings)
            case "fold":
                table = table_at(rows_uri(settings, 1))
                fold_files(table, merge_job(table, ("id",)))
            case "compact":
                compact(settings, CompactionParams(min_files=2, fold="always", vacuum=False), history=int(tick))
            case _:
                publish_to_end(settings, confirm=lambda names: dict.fromkeys(names, int(tick)))


if __name__ == "__main__":
    main(*sys.argv[1:])
