"""What data quality says of a deployment, as whoever gives data up must know it: the one state row of ``quality/results``.

Light: one small file is read; no Great Expectations. What the row means, and who writes it, is millrace.ops.quality's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from millrace.errors import Malformed
from millrace.settings import Settings
from millrace.tables.delta_files import open_table
from millrace.tables.parquet_file import read_file

KIND_STATE: Final = "state"


def results_path(settings: Settings) -> Path:
    """The Delta table of results, with the state row among them."""
    return settings.data_dir / "quality" / "results"


def files_of(table: DeltaTable, kind: str) -> list[str]:
    """The table's live files of one kind, relative to it."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    found: list[str] = actions.filter(pc.equal(actions["partition.kind"], kind))["path"].to_pylist()
    return found


def read_state_row(table: DeltaTable, path: Path) -> tuple[str | None, list[str]]:
    """The state as JSON (None before the first run), and the file that holds it. Raises Malformed where there are several."""
    live = files_of(table, KIND_STATE)
    if len(live) > 1:
        raise Malformed(f"{path} has {len(live)} state rows: something else than the quality run wrote to it")
    return (read_file(path / live[0])["state"][0].as_py() if live else None), live


def standing_blocks(settings: Settings) -> list[str]:
    """Ids of the critical expectations that stand failed: nothing may be given up while there is one."""
    path = results_path(settings)
    table = open_table(path)
    text = None if table is None else read_state_row(table, path)[0]
    return [] if text is None else [block["id"] for block in json.loads(text)["blocks"]]
