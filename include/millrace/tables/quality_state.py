"""The data-quality state of a deployment, for operations that remove data: the one state row of ``quality/results``.

Reads one small file and does not load Great Expectations. millrace.operations.quality writes the row and defines it.
"""

from __future__ import annotations

import json
from typing import Final

import pyarrow.compute as pc

from millrace.base.errors import Malformed
from millrace.base.settings import Settings
from millrace.storage.table import TableHandle, open_table

KIND_STATE: Final = "state"


def quality_results_uri(settings: Settings) -> str:
    """Return the URI of the Delta table of results, which contains the state row."""
    return settings.table_uri("quality/results")


def files_of_kind(table: TableHandle, kind: str) -> list[str]:
    """Return the table's live files of one kind, relative to it."""
    actions = table.actions()
    if actions.num_rows == 0:
        return []
    found: list[str] = actions.filter(pc.equal(actions["partition.kind"], kind))["path"].to_pylist()
    return found


def read_state_row(table: TableHandle) -> tuple[str | None, list[str]]:
    """Return the state as JSON (None before the first run) and its file. Raises Malformed if there are several."""
    live = files_of_kind(table, KIND_STATE)
    if len(live) > 1:
        raise Malformed(f"{table.uri} has {len(live)} state rows: a program other than the quality run wrote to it")
    return (table.read(live[0])["state"][0].as_py() if live else None), live


def failed_critical_expectations(settings: Settings) -> list[str]:
    """Return the ids of failed critical expectations. Nothing may be removed while there is one."""
    path = quality_results_uri(settings)
    table = open_table(path)
    text = None if table is None else read_state_row(table)[0]
    return [] if text is None else [block["id"] for block in json.loads(text)["blocks"]]
