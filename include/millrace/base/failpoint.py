"""Failpoints: named places in the code where a crash test kills or suspends the process.

A failpoint costs one dictionary look-up while nothing is armed. Only ``MILLRACE_TEST_FAILPOINTS=<name>[@<n>][~][,...]``
arms them: on the n-th visit (default: the first) the process dies as by kill -9, without clean-up; with ``~`` it is
suspended until it receives SIGCONT. Code cannot arm a failpoint, so a running deployment has no second behaviour.

Names, and the state at each:

- ``truncation.before``, ``truncation.after``: around the removal of log entries that the checkpoints have passed.
- ``compaction.merged``: the merged file is on disk; nothing is committed.
- ``range.written``: the Parquet files are on disk; the task has not answered.
- ``commit.checked``: the fence was checked; nothing is committed.
- ``commit.done``: the Delta commit exists; Spark's commit log does not have it yet.
- ``checkpoint.written``: a Delta checkpoint exists; older log entries are not cleaned up.
- ``trim.removed``: one more entry of the Delta log is removed.
- ``publish.vectors``, ``publish.checked``, ``publish.committed``, ``publish.expired`` (millrace.storage.published): the
  vector file is on disk; before and after the commit's file; the vector files that one more version released are gone.
- ``recovery.written``: the replacements of damaged files are on disk; nothing is committed.
- ``layout.*`` (millrace.tables.collections.layout): after the steps ``renamed``, ``recorded``, ``moved`` (once a rows
  table), ``emptied`` of the move from an earlier layout.
- ``restore.recorded``, ``restore.inserted``: a restore has begun; one more part of it is in.
- ``flows.held`` (millrace.flows.hold): the flows of a deployment wait.
- ``backup.*`` (millrace.operations.backup): after the steps ``pinned``, ``held``, ``log``, ``copied``, ``written``;
  ``dropped``: an old backup is removed.
- ``move.*`` (millrace.operations.move): ``claimed``, the target is this deployment's; ``file``, before a file is
  copied; ``pass``, after all were; ``closing``, the record says so, and no table is closed; ``closed``, after each
  table; ``copied``, before the switch; ``switched``, ``cancelled``, ``removing``.
- ``restore_backup.copied``: all files are copied; none has its final name.
- ``restore_backup.complete``: the place of the tables is marked as complete; the data folder has not its final name.
- ``staging.uploaded``: the files of an import are in the store; its manifest is not.
- ``append.durable``: entries are in the log; no caller was told.
- ``clock.kept``: the stamp clock's belief is saved; the append that read it is not.
- ``spool.sent``, ``spool.settled``: around the record that a spooled entry was sent.
- ``produce.sent``, ``produce.kept``: around the record that a batch of a load was sent.
- ``sourcing.appended``: a command's events are in the log; its caller was not told, and no snapshot is made.
- ``sourcing.erased``: an aggregate is erased; its snapshot is there still.
- ``sink.journaled``, ``sink.renumbered``, ``sink.uncommitted``, ``sink.sent``, ``sink.done`` (millrace.flows.sinks):
  after the steps of a sink; at ``uncommitted`` the log has all messages but the ends of transactions.
- ``pipeline.written``, ``pipeline.failures``, ``pipeline.commit``, ``pipeline.committed`` (millrace.flows.range_host):
  after the sink, after the error topic, before and after the commit of positions.
- ``redrive.written``: a batch of the error topic is in the sink, but not recorded.
- ``redrive.sent``, ``redrive.queued``: rows of a stream's error topic are in its sink; its source's records wait to be
  read again. The topic's position has not moved.
- ``redrive.resent``: rows of a stream's letters are in the sink, and the letters are still there.
- ``saga.<plan|make|undo>.<step>`` (millrace.pipelines.deploy.runner): before a step's effect; with ``.done``, after it.
- ``pipelines.taken``: the data folder's pipelines are in the configured database, and still in the folder.
- ``import.noted``, ``import.appended``: around the Imports of one VChannel.
- ``backfill.written``: a slice of a derived table is committed, but not recorded.
- ``switch.created``, ``switch.listed``, ``switch.appended``, ``switch.passed``, ``switch.closed``
  (millrace.coord.switch_log): after its steps.
- ``tombstone.proposed``, ``tombstone.fenced``, ``tombstone.placed`` (millrace.node.append.tombstones): after its steps.
- ``ddl.planned``, ``ddl.kept``, ``ddl.sent``, ``ddl.acknowledged`` (millrace.coord.broadcast.broadcaster): nothing is
  stored; the broadcast is stored; a message is appended but not acknowledged; all are acknowledged and the catalog is
  unchanged. ``ddl.called``: the callback of a broadcast of messages has run, and the broadcast is open.
- ``catalog.shared`` (millrace.coord.catalog.shared): a change is in the meta store, but not in the coordinator's file.
- ``keyed.written``, ``keyed.committed``: a shard's files of a keyed stream's batch are on disk; the batch is committed.
- ``into.operated``, ``into.answered``: a stream's operator has committed and no sink has its output; one sink has it,
  the late rows' sink does not.
- ``publish.converted``, ``publish.planned``, ``publish.indexed`` (millrace.node.publish): a converted copy of a file is
  on disk; the change is planned, and nothing is written; the key index follows the commit.
- ``compact.*`` (millrace.operations.compaction): ``written``, a replacement file is on disk; ``base``, after the base
  tick is raised; ``replaced``, ``folded``, ``segments``, after that commit.
"""

from __future__ import annotations

import os
import signal
from typing import Final

from millrace.base.errors import InvalidSettings

VARIABLE: Final = "MILLRACE_TEST_FAILPOINTS"
SUSPENDS: Final = "~"


def parse(text: str) -> dict[str, int]:
    """Parse ``name[@n],...`` into {name: n}, without the ``~``.

    Raises InvalidSettings if n is not a positive integer.
    """
    armed: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, count = item.removesuffix(SUSPENDS).partition("@")
        if not name or (count and not (count.isascii() and count.isdigit() and int(count) > 0)):
            raise InvalidSettings(f"{VARIABLE}: {item!r} is not <name>[@<n>][{SUSPENDS}]")
        armed[name] = int(count or 1)
    return armed


_given: Final = os.environ.get(VARIABLE, "").split(",")
_armed: Final = parse(os.environ.get(VARIABLE, ""))
_suspends: Final = frozenset(
    item.partition("@")[0].removesuffix(SUSPENDS) for item in _given if item.endswith(SUSPENDS)
)


def hit(name: str) -> None:
    """Pass the failpoint `name`. Does not return if this visit is armed, or returns late."""
    if name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] == 0:
        os.kill(os.getpid(), signal.SIGSTOP if name in _suspends else signal.SIGKILL)
