"""Which tick of the collections holds which transaction of the database.

for each in recorded_ticks(settings, "shop"):
    orders = db["orders"].read(at=each.tick)       # all of one moment of the database
    customers = db["customers"].read(at=each.tick)
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from millrace.base.errors import InvalidArgument
from millrace.base.settings import Settings
from millrace.flows.sources.capture.shared_spool import forget_spool
from millrace.flows.sources.capture.spool import MAX_TICKS, Recorded, Spool

_GTID = re.compile(r"(\d+)-\d+-(\d+)")
_LSN = re.compile(r"\d+:(\d+)")


def spool_folder(settings: Settings, group: str) -> Path:
    """Return the folder of the spool of the flow with this consumer group."""
    return settings.data_dir / "captures" / group


def remove_spool(settings: Settings, group: str) -> None:
    """Remove the spool of a flow that ends, here and where all machines share it. Raises MetaUnavailable, OSError."""
    forget_spool(settings, group)
    with suppress(FileNotFoundError):
        shutil.rmtree(spool_folder(settings, group))


def recorded_ticks(settings: Settings, flow: str, *, limit: int = MAX_TICKS) -> list[Recorded]:
    """Return the newest recorded ticks of a flow that captures a database on this machine, oldest first.

    Raises InvalidArgument if the flow captures nothing here.
    """
    folder = spool_folder(settings, f"millrace-{flow}")
    if not folder.exists():
        raise InvalidArgument(f"{flow!r} has captured no database on this machine, so it has no recorded ticks")
    with Spool(folder) as spool:
        return spool.ticks(limit=limit)


def tick_of(settings: Settings, flow: str, transaction: str) -> Recorded:
    """Return the first recorded tick at which the collections hold a transaction of the source.

    `transaction` is a GTID of MariaDB (``0-1-4711``), or a transaction of PostgreSQL with its LSN (``571:53195832``).
    Raises InvalidArgument if there is none yet.
    """
    wanted = _place(transaction)
    if wanted is None:
        raise InvalidArgument(f"{transaction[:100]!r} is no transaction: give a GTID such as 0-1-4711, or TXID:LSN")
    for each in recorded_ticks(settings, flow):
        found = _place(each.mark.source)
        if found is not None and found[0] == wanted[0] and found[1] >= wanted[1]:
            return each
    raise InvalidArgument(f"{flow!r} has no recorded tick at or after the transaction {transaction}: wait for it")


def _place(source: str) -> tuple[str, int] | None:
    """The sequence that a transaction is of, and its number there."""
    if (gtid := _GTID.fullmatch(source)) is not None:
        return gtid[1], int(gtid[2])
    lsn = _LSN.fullmatch(source)
    return None if lsn is None else ("", int(lsn[1]))
