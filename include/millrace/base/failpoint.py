"""Named places where a crash test stops a process; they cost one dictionary look-up while nothing is armed.

Armed only from outside, by ``MILLRACE_TEST_FAILPOINTS=<name>[@<n>][~][,...]``: the n-th time (default: the first) the process
comes by that place it dies as kill -9 would have it, without cleaning up; with ``~`` it is suspended there, until somebody wakes
it. Nothing here can be armed by code, so that a
running deployment has no second way to behave.

Places: ``truncation.before`` and ``truncation.after`` (around the removal of what the checkpoints have passed),
``compaction.merged`` (the merged file is on disk, nothing is committed), ``range.written`` (Parquet files are on disk, the task has not answered), ``commit.checked`` (the fence was
checked, nothing is committed), ``commit.done`` (the Delta commit stands, Spark's commit log does not know it yet),
``checkpoint.written`` (a Delta checkpoint stands, the log before older ones is not cleaned up),
``trim.removed`` (one more entry of the Delta log is gone), ``recovery.written`` (what replaces damaged files is on disk,
nothing is committed), ``restore.recorded`` and ``restore.inserted`` (a restore has begun; one more part of it is in),
``backup.*`` (millrace.operations.backup: ``pinned``, ``log``, ``copied``, ``written``, behind its steps; ``dropped``, an old one is gone),
``restore_backup.copied`` (all is copied, nothing has its name yet),
``clock.kept`` (what the stamps' clock believes is kept, the append that looked at it is not),
``spool.sent`` and ``spool.settled`` (around the note that a spooled entry was sent),
``produce.sent`` and ``produce.kept`` (around the note that a batch of a load was sent),
``sink.journaled``, ``sink.renumbered``, ``sink.sent``, ``sink.done`` (millrace.streams.sinks: behind the steps of a sink),
``pipeline.written``, ``pipeline.failures``, ``pipeline.commit``, ``pipeline.committed`` (millrace.pipelines.worker: behind the sink, behind
the error topic, before and behind the commit of positions), ``redrive.written`` (a batch of the error topic is in the sink, not noted),
``saga.<plan|make|undo>.<step>`` and the same with ``.done`` (millrace.pipelines.deploy.runner: before and behind the effect of a pipeline's step),
``pipelines.taken`` (pipelines of the data folder are in the database that the settings name now, and in the folder too),
``import.noted`` and ``import.appended`` (around the Imports of one VChannel),
``backfill.written`` (a slice of a derived table is committed, not recorded),
``switch.created``, ``switch.listed``, ``switch.appended``, ``switch.passed``, ``switch.closed`` (millrace.coord.switch_log: behind
its steps),
``tombstone.proposed``, ``tombstone.fenced``, ``tombstone.placed`` (millrace.node.append.tombstones: behind its steps),
``ddl.planned``, ``ddl.kept``, ``ddl.sent``, ``ddl.acknowledged`` (millrace.coord.broadcast.broadcaster: nothing is kept yet; a broadcast is
kept; a message is appended, not acknowledged; all are, and the catalog is as it was),
``catalog.shared`` (millrace.coord.shared_catalog: a change stands in the meta store, and not in the coordinator's file),
``keyed.written`` and ``keyed.committed`` (a shard's files of a keyed stream's batch are on disk; the batch is committed),
``into.operated`` and ``into.answered`` (a stream's operator has committed, no sink has its answers; one has them, the late rows' has not),
``compact.*`` (millrace.operations.compaction: ``written``, a file that replaces others is on disk; ``base``, behind
the raising of the base tick; ``replaced``, ``folded``, ``segments``, behind that commit).
"""

from __future__ import annotations

import os
import signal
from typing import Final

from millrace.base.errors import InvalidSettings

VARIABLE: Final = "MILLRACE_TEST_FAILPOINTS"
SUSPENDS: Final = "~"


def parse(text: str) -> dict[str, int]:
    """``name[@n],...`` as {name: n}, without the ``~``. Raises InvalidSettings where n is no positive integer."""
    armed: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, count = item.removesuffix(SUSPENDS).partition("@")
        if not name or (count and not (count.isascii() and count.isdigit() and int(count) > 0)):
            raise InvalidSettings(f"{VARIABLE}: {item!r} is no <name>[@<n>][{SUSPENDS}]")
        armed[name] = int(count or 1)
    return armed


_given: Final = os.environ.get(VARIABLE, "").split(",")
_armed: Final = parse(os.environ.get(VARIABLE, ""))
_suspends: Final = frozenset(
    item.partition("@")[0].removesuffix(SUSPENDS) for item in _given if item.endswith(SUSPENDS)
)


def hit(name: str) -> None:
    """Come by the place `name`; does not return where that is the armed visit, or late."""
    if name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] == 0:
        os.kill(os.getpid(), signal.SIGSTOP if name in _suspends else signal.SIGKILL)
