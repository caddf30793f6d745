"""The ticks of the collections at which they hold a transaction of the database.

for each in recorded_ticks(settings, "shop"):
    orders = db["orders"].read(at=each.tick)       # all of one moment of the database
    customers = db["customers"].read(at=each.tick)
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from millrace.base.errors import FlowNotRunning, InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.requests import ask
from millrace.flows.sources.capture.shared_spool import forget_spool, shared_spool
from millrace.flows.sources.capture.spool import (
    FILE,
    MAX_TICKS,
    Mark,
    Recorded,
    Spool,
    copy_shared_spool,
    is_fed_here,
)

CAPTURES: Final = "captures"
"""Folder of the spools in a data folder."""
PAGE: Final = 1000
"""Ticks of one answer."""
_GTID = re.compile(r"(\d+)-\d+-(\d+)")
_LSN = re.compile(r"\d+:(\d+)")


def spool_folder(settings: Settings, group: str) -> Path:
    """Return the folder of the spool of the flow with this consumer group."""
    return settings.data_dir / CAPTURES / group


def remove_spool(settings: Settings, group: str) -> None:
    """Remove the spool of a flow that ends, on this machine and in the shared store.

    Raises MetaUnavailable, OSError.
    """
    forget_spool(settings, group)
    with suppress(FileNotFoundError):
        shutil.rmtree(spool_folder(settings, group))


def recorded_ticks(settings: Settings, flow: str, *, limit: int = MAX_TICKS) -> list[Recorded]:
    """Return the newest recorded ticks of a flow that captures a database, oldest first.

    With a meta store, whichever machine of the deployment runs the flow: its worker answers, or, if none runs, what all
    machines share. Raises InvalidArgument if the flow captures nothing, DeadlineExceeded, MetaUnavailable, CaptureLost.
    """
    group = f"millrace-{flow}"
    folder = spool_folder(settings, group)
    if settings.meta_store and not is_fed_here(folder):
        with suppress(FlowNotRunning):
            return _asked_ticks(settings, flow, limit)
        found = shared_spool(settings, group)
        assert found is not None, "there is a meta store"
        with closing(found), TemporaryDirectory() as scratch:
            if found.read():
                copy_shared_spool(found, Path(scratch))
                folder = Path(scratch)
            return _ticks_in(folder, flow, limit)
    return _ticks_in(folder, flow, limit)


def _ticks_in(folder: Path, flow: str, limit: int) -> list[Recorded]:
    if not (folder / FILE).exists():
        raise InvalidArgument(f"{flow!r} has captured no database here, so it has no recorded ticks")
    with Spool(folder) as spool:
        return spool.ticks(limit=limit)


def _asked_ticks(settings: Settings, flow: str, limit: int) -> list[Recorded]:
    found: list[Recorded] = []
    while len(found) < limit:
        before = found[0].tick if found else None
        answers = ask(settings, flow, "ticks", {"limit": min(limit - len(found), PAGE), "before": before})
        page = [Recorded(tick, Mark(*mark)) for tick, *mark in next(iter(answers.values()))]
        found = [*page, *found]
        if len(page) < PAGE:
            break
    return found


def answer_ticks(settings: Settings, group: str, arguments: Mapping[str, Any]) -> list[list[Any]]:
    """Return a page of recorded ticks for a command on another machine (millrace.flows.requests)."""
    folder = spool_folder(settings, group)
    if not (folder / FILE).exists():
        raise InvalidArgument(f"the flow of the consumer group {group!r} captures no database")
    with Spool(folder) as spool:
        found = spool.ticks(limit=min(int(arguments["limit"]), PAGE), before=arguments["before"])
    return [[each.tick, *each.mark[:3]] for each in found]


def tick_of(settings: Settings, flow: str, transaction: str) -> Recorded:
    """Return the first recorded tick at which the collections hold a transaction of the source.

    `transaction` is a GTID of MariaDB (``0-1-4711``), or a transaction of PostgreSQL with its LSN (``571:53195832``).
    Raises InvalidArgument if there is none yet.
    """
    wanted = _place(transaction)
    if wanted is None:
        raise InvalidArgument(f"{transaction[:100]!r} is not a transaction: give a GTID such as 0-1-4711, or TXID:LSN")
    for each in recorded_ticks(settings, flow):
        found = _place(each.mark.source)
        if found is not None and found[0] == wanted[0] and found[1] >= wanted[1]:
            return each
    raise InvalidArgument(f"{flow!r} has no recorded tick at or after the transaction {transaction}: wait for it")


def _place(source: str) -> tuple[str, int] | None:
    """Return the sequence of a transaction and its number in it; None if the form is unknown."""
    if (gtid := _GTID.fullmatch(source)) is not None:
        return gtid[1], int(gtid[2])
    lsn = _LSN.fullmatch(source)
    return None if lsn is None else ("", int(lsn[1]))
