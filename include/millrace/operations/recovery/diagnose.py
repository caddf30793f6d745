"""Diagnosis: each check looks for one kind of fault and changes nothing.

``quick`` checks jobs, parked channels, the log's end, open transactions, and the name and size of every live file.
``full`` also compares contents: the log run through the chain with the rows and the state of the WAL; and, on a clone
that a flusher has brought up to date, the WAL with the collections.

``changed`` is ``full`` at most once in RECHECK_SECONDS, because a damaged disk commits nothing. In between it omits
tables without a commit since a run found nothing wrong (:mod:`millrace.operations.coverage`), and compares the WAL from
its newest checkpoint on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import pyarrow as pa

from millrace.base.errors import LogRegressed, Malformed, MillraceError, PositionTruncated, StagedFileDamaged, WalGap
from millrace.base.file_lock import is_report_live
from millrace.base.settings import Settings
from millrace.coord.catalog.sync import GetDefinitions
from millrace.log.clock import log_or_wall_time_ms
from millrace.log.protocol import LogService
from millrace.message.ids import LOGICAL_BITS, compose_tick
from millrace.node.flush.definition import FlushPlanner, flush_to_end
from millrace.node.ingest.ingester import check_not_regressed
from millrace.node.range_loop.parking import read_parked
from millrace.node.range_loop.schedule import UNBOUNDED
from millrace.operations.checkpoint import recovery_checkpoints
from millrace.operations.checkpoint.replay_verification import VerificationStart, verify_checkpoint
from millrace.operations.coverage import Coverage
from millrace.operations.recovery.catalog_repair import catalog_differences
from millrace.operations.recovery.clone import clone, tables_to_clone
from millrace.operations.recovery.findings import RecoveryFinding
from millrace.operations.recovery.replay import replay_starts
from millrace.operations.verification import verify_channel, verify_collections
from millrace.runtime.progress import Progress
from millrace.storage.table import TableHandle, open_table, table_exists
from millrace.tables.collections.layout import rows_name
from millrace.tables.read.freshness import lacks_rows
from millrace.tables.wal.reader import WalSnapshot
from millrace.tables.wal.table import WalTable
from millrace.wal.state import ChannelState

Contents = Literal["none", "since", "all"]
"""Part of a PChannel's WAL to compare: nothing, the part after its newest checkpoint, or all of it."""

QUERIES = ("streaming-node", "flusher")
"""Queries with progress files in the run folder."""

PLANS = 10
"""Attempts to check a PChannel while truncation removes entries that the check was about to read."""

RECHECK_SECONDS = 86_400.0
"""Time after which depth ``changed`` looks at everything again."""

_TXN_GRACE_MS = 60_000
"""Time after the end of its lease at which a transaction counts as stuck. A tick may be on its way until then."""


def diagnose(
    settings: Settings,
    service: LogService,
    *,
    depth: str,
    stale_after: float,
    progress: Progress,
    ask: GetDefinitions | None = None,
) -> list[RecoveryFinding]:
    """Return every finding, the WAL's before the collections'.

    Collections are compared only if the WAL is intact, and the catalog only if `ask`, which queries the chain, is
    given.
    """
    progress.update("checking jobs, channels and files")
    covered = Coverage.load(settings, "recovery", depends={"format": 1}, ignore=depth != "changed")
    whole_at = covered.note("wal") or 0.0
    if not 0 <= time.time() - whole_at < RECHECK_SECONDS:
        whole_at = 0.0
    names = list(tables_to_clone(settings))
    changed = [name for name in names if covered.look(name, settings.table_uri(name)) is None]
    if not whole_at:
        changed = names
    found = [*_jobs(settings, service, stale_after), *_parked(settings), *_checkpoints(settings)]
    found += _files(settings, changed)
    if ask is not None:
        found += [
            RecoveryFinding(kind="catalog_differs", subject=each.name, words=each.detail)
            for each in catalog_differences(settings, service, ask)
        ]
    if not table_exists(settings.wal_uri):
        return found
    began = time.time()
    contents: Contents = "none" if depth == "quick" or "wal" not in changed else "since" if whole_at else "all"
    pchannels = WalTable.open(settings.wal_uri).pchannels()
    for number, pchannel in enumerate(pchannels):
        progress.step(f"checking the WAL of {pchannel}", number, len(pchannels), pchannel=pchannel)
        damaged = {each.kind for each in found if each.subject == pchannel and each.kind.startswith("wal_")}
        if "wal_state_damaged" not in damaged:
            look = partial(_channel, settings, service, pchannel, contents="none" if damaged else contents)
            found += _find_in_current(settings, look)
    if depth != "quick" and changed and not any(each.kind.startswith(("wal_", "table_")) for each in found):
        progress.update("comparing the collections with the WAL")
        found += _collections(settings)
    if depth != "quick":
        for name in names:
            covered.record(name, note=(whole_at or began) if name == "wal" else None)
        covered.retain(() if found else names)  # after a finding, the next run looks at everything
        covered.save()
    return found


def _find_in_current(settings: Settings, look: Callable[[WalTable], list[RecoveryFinding]]) -> list[RecoveryFinding]:
    """Return what `look` finds in the current WAL.

    Truncation removes what the tables already have, and may remove entries that the check was about to read. The check
    then starts again from the current tables.

    Raises PositionTruncated if that happens PLANS times.
    """
    for _ in range(PLANS - 1):
        with suppress(PositionTruncated):
            return look(WalTable.open(settings.wal_uri))
    return look(WalTable.open(settings.wal_uri))


def _jobs(settings: Settings, service: LogService, stale_after: float) -> Iterator[RecoveryFinding]:
    """Yield jobs that ran once, are gone or make no progress, and have had work to do for `stale_after` seconds.

    An idle job reports nothing for hours, so the waiting work must be old, not only the job's last report. Rows wait
    for the flusher on purpose for ``flush_interval``.
    """
    now_ms = log_or_wall_time_ms(service)
    limits = {"streaming-node": stale_after, "flusher": stale_after + settings.flush_interval}
    ticks = {name: compose_tick(max(0, now_ms - int(limit * 1000)), 0) for name, limit in limits.items()}
    behind = {
        "streaming-node": _node_lag(settings, service, ticks["streaming-node"]),
        "flusher": _flusher_lag(settings, ticks["flusher"]),
    }
    for name in QUERIES:
        path = settings.progress_path(name)
        try:
            said = json.loads(path.read_text())
            age = time.time() - path.stat().st_mtime
        except (FileNotFoundError, json.JSONDecodeError):
            continue  # it never ran here, or its file is being replaced
        if not behind[name] or age < limits[name]:
            continue
        pid = int(said.get("pid", 0))
        runs = is_report_live(settings.run_path, pid, float(said.get("at", 0.0)))
        state = f"process {pid} runs but has reported nothing" if runs else f"process {pid} is gone"
        yield RecoveryFinding(kind="job_dead", subject=name, words=f"{state} for {age:.0f} s; {behind[name]}")


def _node_lag(settings: Settings, service: LogService, since: int) -> str:
    """Describe the PChannels with rows in the log before the tick `since` that the WAL lacks.

    Time ticks do not count.
    """
    wal = WalTable.open(settings.wal_uri) if table_exists(settings.wal_uri) else None
    waiting = []
    for pchannel in service.names():
        log = service.open(pchannel)
        try:
            if lacks_rows(wal, log, pchannel, up_to=since):
                waiting.append(pchannel)
        except (OSError, Malformed):  # a damaged state row has its own check
            continue
        finally:
            log.close()
    return f"entries wait in the log of {', '.join(waiting)}" if waiting else ""


def _flusher_lag(settings: Settings, since: int) -> str:
    planner = FlushPlanner(settings, since)
    try:
        plans = planner.plan(planner.ends(), max_bytes=UNBOUNDED)
    except (OSError, MillraceError):  # damaged tables have findings of their own
        return ""
    return f"rows of {', '.join(plan.channel for plan in plans)} wait in the WAL" if plans else ""


def _parked(settings: Settings) -> Iterator[RecoveryFinding]:
    for parked in read_parked(settings.parked_path):
        yield RecoveryFinding(
            kind="channel_parked",
            subject=parked.pchannel,
            words=f"at entry {parked.position} since {parked.since}: {parked.code}: {parked.message}",
        )


def _checkpoints(settings: Settings) -> Iterator[RecoveryFinding]:
    """Yield a finding for verified states that cannot be read. They are small, so every one is read."""
    bad = {
        name: words
        for owner, name in recovery_checkpoints.live_files(settings)
        if (words := _unreadable(settings, owner, name))
    }
    if bad:
        yield RecoveryFinding(
            kind="table_file_damaged", subject="recovery_checkpoints", words=_few(bad), files=tuple(bad)
        )


def _unreadable(settings: Settings, pchannel: str, name: str) -> str:
    try:
        recovery_checkpoints.load(settings, pchannel, name)
    except FileNotFoundError:
        return "missing"
    except (OSError, MillraceError, pa.ArrowException) as error:
        return str(error)
    return ""


def _files(settings: Settings, names: Sequence[str]) -> Iterator[RecoveryFinding]:
    """Yield live files of the tables `names` that are missing, or whose size differs from their commit."""
    for subject in names:
        table = open_table(settings.table_uri(subject))
        assert table is not None
        bad = {name: words for name, size in table.live_files().items() if (words := _wrong(table, name, size))}
        if not bad:
            continue
        if subject != "wal":
            yield RecoveryFinding(
                kind="table_file_damaged",
                subject=subject,
                words=_few(bad),
                files=tuple(bad),
            )
            continue
        for pchannel in sorted({_part(name, "pchannel") for name in bad}):
            of = {name: words for name, words in bad.items() if _part(name, "pchannel") == pchannel}
            states = {name: words for name, words in of.items() if _part(name, "kind") == "state"}
            rows = {name: words for name, words in of.items() if name not in states}
            if states:
                yield RecoveryFinding(
                    kind="wal_state_damaged", subject=pchannel, words=_few(states), files=tuple(states)
                )
            if rows:
                yield RecoveryFinding(kind="wal_file_damaged", subject=pchannel, words=_few(rows), files=tuple(rows))


def _wrong(table: TableHandle, name: str, size: int) -> str:
    actual = table.store.size(name)
    if actual is None:
        return "missing"
    return "" if actual == size else f"{actual} bytes instead of {size}"


def _few(bad: dict[str, str]) -> str:
    shown = "; ".join(f"{name}: {words}" for name, words in list(bad.items())[:3])
    return shown + (f"; and {len(bad) - 3} more" if len(bad) > 3 else "")


def _part(name: str, column: str) -> str:
    return name.partition(f"{column}=")[2].partition("/")[0]


def _channel(
    settings: Settings, service: LogService, pchannel: str, wal: WalTable, *, contents: Contents
) -> list[RecoveryFinding]:
    try:
        state = wal.position(pchannel).state
    except (OSError, Malformed, pa.ArrowException) as error:
        return [RecoveryFinding(kind="wal_state_damaged", subject=pchannel, words=str(error))]
    assert state is not None
    log = service.open(pchannel)
    try:
        check_not_regressed(log, state)
    except LogRegressed as error:
        return [RecoveryFinding(kind="log_regressed", subject=pchannel, words=str(error))]
    finally:
        log.close()
    found = []
    now = log_or_wall_time_ms(service) - _TXN_GRACE_MS << LOGICAL_BITS
    for name, vchannel in state.vchannels.items():
        late = [txn.id for txn in vchannel.txns.values() if txn.deadline(state.config) < now]
        if late:
            found.append(RecoveryFinding(kind="txn_stuck", subject=pchannel, words=f"{name}: transactions {late}"))
    if contents == "all" or (contents == "since" and not _agrees_since_checkpoint(settings, wal, service, pchannel)):
        found += _contents(settings, wal, service, pchannel, state)
    return found


def _agrees_since_checkpoint(settings: Settings, wal: WalTable, service: LogService, pchannel: str) -> bool:
    """Return whether WAL and log agree from the newest recovery checkpoint on. False without one."""
    position, known = wal.position(pchannel), recovery_checkpoints.newest(settings, pchannel).get(pchannel)
    if known is None or known.commits > position.commits:
        return False
    if known.commits == position.commits:
        return True
    start = VerificationStart(known.state, known.totals, contiguous=True)
    log = service.open(pchannel)
    try:
        return not verify_checkpoint(wal, WalSnapshot(wal.table), position, start, log).problem
    finally:
        log.close()


def _contents(
    settings: Settings, wal: WalTable, service: LogService, pchannel: str, state: ChannelState
) -> list[RecoveryFinding]:
    """Compare the whole WAL with what its commits counted, and the remaining log with the WAL from its beginning on."""
    snapshot = WalSnapshot(wal.table)
    starts = [each for each in replay_starts(settings, service, pchannel) if each.state.position <= state.position]
    try:
        start = (starts[0].state, starts[0].totals) if starts else None
        report = verify_channel(snapshot, wal, service if starts else None, pchannel, start=start)
    except (WalGap, OSError, pa.ArrowException) as error:
        return [RecoveryFinding(kind="wal_rows_differ", subject=pchannel, words=str(error))]
    if report.committed != report.stored:
        return [
            RecoveryFinding(
                kind="wal_rows_differ", subject=pchannel, words="the rows differ from those that were committed"
            )
        ]
    if report.replayed not in (None, report.committed):
        words = "the log gives rows that differ from those the commits counted"
        return [RecoveryFinding(kind="log_regressed", subject=pchannel, words=words)]
    if report.state is not None and report.state.to_bytes() != wal.position(pchannel).state_bytes:
        words = "the state row differs from what the log gives at its position"
        return [RecoveryFinding(kind="wal_state_damaged", subject=pchannel, words=words)]
    return []


def _collections(settings: Settings) -> list[RecoveryFinding]:
    with clone(settings) as copy:
        try:
            flush_to_end(copy)
            reports = verify_collections(copy)
        except StagedFileDamaged as error:  # the WAL cannot be compared without these rows
            words = str(error).replace(copy.staged_uri, settings.staged_uri)
            return [RecoveryFinding(kind="staged_file_damaged", subject="staged", words=words)]
        names = {number: rows_name(settings, number) for number in reports}
    return [
        RecoveryFinding(
            kind="collection_differs",
            subject=names[number],
            words=f"{report.stored} rows stored, {report.visible_inserted - report.folded} became visible in the WAL"
            + ("; their contents differ" if report.stored + report.folded == report.visible_inserted else ""),
            # As many rows or more, but different ones: no message accounts for some of them.
            destructive=report.stored + report.folded >= report.visible_inserted,
        )
        for number, report in sorted(reports.items())
        if not report.ok
    ]
