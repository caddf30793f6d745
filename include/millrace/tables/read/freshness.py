"""The tick up to which a collection can be read, with the help of the log: an idle PChannel does not delay a read.

The ``wal`` table's tick of an idle PChannel does not move, because a tick without news becomes no row. So a reader asks
the append host how far each PChannel is decided. What the table lacks up to there comes from the host, too, in the same
call (:func:`decided_messages`): a read does not wait for the streaming node. If the host's buffer does not have it all,
the reader appends a tick to each PChannel and checks whether the log has any row up to that tick that the table lacks.
If not, the table is complete up to that tick; else the reader waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError, PositionTruncated, TickNotReached
from millrace.base.settings import Settings
from millrace.log.protocol import Log, LogService
from millrace.message.ids import EARLIEST, tick_physical_ms
from millrace.rpc.selection import ALL_ROWS, Selection
from millrace.rpc.tail import DecidedMessages, messages_of
from millrace.storage.table import open_table
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.open_tables import OpenTables
from millrace.tables.read.plan import ReadPlan, plan_read
from millrace.tables.wal.log_replay import UncommittedMessages
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState

PEEK_BYTES: Final = 256 << 10
UNCOMMITTED_BYTES: Final = 1 << 30
"""Memory that the messages of a read from the log may take."""
DECIDED_BYTES: Final = 32 << 20
"""Messages that a read takes from the append host; beyond, it waits for the streaming node."""
MAX_TICK: Final = (1 << 63) - 1

_POLL_SECONDS: Final = 0.02
_TICK_SECONDS: Final = 0.5
"""Pause between two ticks while a read waits for a tick ahead of the clock."""


class TickSource(Protocol):
    """A client of the append host (millrace.client.append_client.AppendClient), or a local host and its log."""

    @property
    def service(self) -> LogService: ...

    def tick(self, pchannel: str, *, persist: bool = True) -> int: ...

    def decided(
        self, collection_id: int, after: Mapping[str, int], *, at: int | None, max_bytes: int
    ) -> DecidedMessages: ...


class ConfirmedTicks(NamedTuple):
    """The completeness of the ``wal`` table."""

    ticks: dict[str, int]
    """For each PChannel, the tick up to which it is complete."""
    missing: str
    """The event that the read still waits for, and how to get it; empty if there is none."""


def confirm_ticks(
    settings: Settings,
    pchannels: Sequence[str],
    client: TickSource,
    *,
    at: int | None = None,
    seconds: float,
    from_log: bool = False,
) -> ConfirmedTicks:
    """Return by PChannel the tick up to which the ``wal`` table is complete, and what is missing.

    Waits up to `seconds` for the streaming job, and for the tick `at`. Without `at`, waits for everything that was
    decided on any of the PChannels before the call. Returns at once if `at` is more than `seconds` ahead of the clock.
    A PChannel that cannot be asked (because it is parked, say) is left out; a read then uses the table's own tick.
    With `from_log`, what the log has counts too: nothing waits for the table.
    """
    end = Deadline.after(seconds)
    ticks: dict[str, int] = {}
    whole: dict[str, int] = {}
    unasked: dict[str, MillraceError] = {}
    """Reason that a PChannel's tick is not known."""
    lacking: dict[str, tuple[int, int]] = {}
    """For each PChannel, the (table version, tick) at which rows are known to be missing. Checked again once either
    moves."""
    target = at or 0
    wal: WalTable | None = None
    while True:
        if wal is not None:
            wal.refresh()
        elif not from_log and (table := open_table(settings.wal_uri)) is not None:
            wal = WalTable(table)
        for name in pchannels:
            try:
                if ticks.get(name, 0) < max(1, target):
                    ticks[name] = client.tick(name, persist=False)
                    if ticks[name] < target:  # the time of a broker's log does not advance without an entry
                        ticks[name] = client.tick(name)
                    unasked.pop(name, None)
            except MillraceError as error:
                unasked[name] = error
        if at is None and not target:
            target = max(ticks.values(), default=0)  # one clock, but ticks within a millisecond differ by channel
        for name in ticks:
            try:
                wanted = ticks[name] if at is None else min(ticks[name], at)  # the read ignores what follows `at`
                if from_log:
                    whole[name] = wanted
                    continue
                place = (-1 if wal is None else wal.version, wanted)
                if whole.get(name, -1) < wanted and lacking.get(name) != place:
                    log = client.service.open(name)
                    if lacks_rows(wal, log, name, up_to=wanted):
                        lacking[name] = place
                    else:
                        whole[name] = wanted
                    log.close()
            except MillraceError:
                continue
        if all(whole.get(name, -1) >= (at if at is not None else max(1, target)) for name in pchannels):
            return ConfirmedTicks(whole, "")
        ahead = 0.0 if at is None else _seconds_ahead(at, ticks)
        if ahead > end.remaining() or not end.pause(_TICK_SECONDS if ahead else _POLL_SECONDS):
            return ConfirmedTicks(whole, _lacking(pchannels, at, whole, unasked, ahead))


def _seconds_ahead(at: int, ticks: Mapping[str, int]) -> float:
    """Return the seconds until the log's clock reaches `at`; above 0.0 if a tick has not reached it."""
    newest = min(ticks.values(), default=at)
    return max(0.001, (tick_physical_ms(at) - tick_physical_ms(newest)) / 1000) if newest < at else 0.0


def _lacking(
    pchannels: Sequence[str],
    at: int | None,
    whole: Mapping[str, int],
    unasked: Mapping[str, MillraceError],
    ahead: float,
) -> str:
    if ahead:
        return f"the tick {at} is {ahead:,.1f} s ahead of the log's clock: read later, or without a tick"
    name = next((each for each in pchannels if each in unasked and each not in whole), None)
    if name is not None:
        return f"cannot get the tick of {name} ({unasked[name].code}: {unasked[name]}): fix that (`millrace status`)"
    behind = [each for each in pchannels if whole.get(each, -1) < (at or 1)]
    return (
        f"the log has rows on {', '.join(behind or pchannels)} that the wal table lacks: is the streaming node running"
        " (`millrace status`)? Or read at an older tick"
    )


def read_fresh(
    settings: Settings,
    name: str,
    collection_id: int,
    pchannels: Sequence[str],
    client: TickSource,
    *,
    at: int | None,
    seconds: float,
    selection: Selection = ALL_ROWS,
    from_log: bool = False,
    tables: OpenTables | None = None,
) -> pa.Table:
    """Return the selected rows of a collection at `at`, or of everything decided before the call.

    What the tables lack comes from the append host, as far as its buffer reaches. Otherwise waits for the tables; with
    `from_log`, reads it from the log (:func:`uncommitted_messages`) instead of waiting. `tables` are those of
    :func:`millrace.tables.read.plan.plan_read`.

    Raises TickNotReached after `seconds`, and what :func:`millrace.tables.read.arrow.read_arrow` raises.
    """
    rest: dict[str, list[pa.Table]] | None
    decided = decided_messages(settings, client, collection_id, pchannels, at=at, tables=tables)
    if decided is not None:
        confirmed, rest = decided
    else:
        confirmed = require_confirmed_ticks(settings, name, pchannels, client, at, seconds, from_log=from_log)
        rest = uncommitted_messages(settings, client, collection_id, confirmed) if from_log else None
    return read_arrow(
        settings,
        collection_id,
        at=at,
        deadline=0.0,
        confirmed=confirmed,
        uncommitted=rest,
        selection=selection,
        tables=tables,
    )


def plan_fresh(
    settings: Settings,
    name: str,
    collection_id: int,
    pchannels: Sequence[str],
    client: TickSource,
    *,
    at: int | None,
    seconds: float,
    from_log: bool = False,
    on_missing: Callable[[str], None] | None = None,
    tables: OpenTables | None = None,
) -> ReadPlan:
    """Plan what :func:`read_fresh` would read, for :func:`millrace.tables.read.arrow.read_pieces`.

    With `on_missing`, rows that are missing after `seconds` raise nothing here: `on_missing` is called with what is
    missing, and a read without `at` is planned as of the newest tick that is complete. `tables` are those of
    :func:`millrace.tables.read.plan.plan_read`.
    """
    tables = tables or OpenTables()
    rest: dict[str, list[pa.Table]] | None
    decided = decided_messages(settings, client, collection_id, pchannels, at=at, tables=tables)
    if decided is not None:
        ticks, rest = decided
        return plan_read(settings, collection_id, at=at, deadline=0.0, confirmed=ticks, uncommitted=rest, tables=tables)
    if on_missing is None:
        ticks = require_confirmed_ticks(settings, name, pchannels, client, at, seconds, from_log=from_log)
    else:
        ticks, missing = confirm_ticks(settings, pchannels, client, at=at, seconds=seconds, from_log=from_log)
        if missing:
            on_missing(missing)
    rest = uncommitted_messages(settings, client, collection_id, ticks) if from_log else None
    return plan_read(settings, collection_id, at=at, deadline=0.0, confirmed=ticks, uncommitted=rest, tables=tables)


def decided_messages(
    settings: Settings,
    client: TickSource,
    collection_id: int,
    pchannels: Sequence[str],
    *,
    at: int | None,
    tables: OpenTables | None = None,
) -> tuple[dict[str, int], dict[str, list[pa.Table]]] | None:
    """Return by PChannel the tick up to which everything is decided, and the messages up to it that ``wal`` lacks, from
    the append host.

    Without `at`, the ticks are after everything that was decided on any of the PChannels before the call. With `at`,
    nothing is asked of a PChannel whose table has reached it. Returns None if the host cannot be asked, has not reached
    `at`, or its buffers lack messages or have more than DECIDED_BYTES. Bodies of other collections are left out.
    """
    wal = (tables or OpenTables()).wal(settings.wal_uri)
    committed = {name: 0 if wal is None else wal.last_tick(name) for name in pchannels}
    ticks = {name: tick for name, tick in committed.items() if at is not None and tick >= at}
    found: dict[str, list[pa.Table]] = {name: [] for name in pchannels}
    after = {name: tick for name, tick in committed.items() if name not in ticks}
    if after:
        try:
            decided = client.decided(collection_id, after, at=at, max_bytes=DECIDED_BYTES)
        except MillraceError:
            return None  # a parked PChannel, say: the caller finds out which, and waits if that helps
        ticks |= decided.ticks
        if not decided.complete or min(ticks.values()) < max(1, at or 0):
            return None
        found |= {name: [pa.Table.from_batches([each]) for each in few] for name, few in decided.messages.items()}
    return ticks, found


def uncommitted_messages(
    settings: Settings, client: TickSource, collection_id: int, ticks: Mapping[str, int]
) -> dict[str, list[pa.Table]]:
    """Return by PChannel the messages up to its tick that the log has after the ``wal`` table.

    Bodies of other collections are left out. Cost: the chain judges all entries of these PChannels after the table, on
    each call. Memory: the messages that are returned, at most UNCOMMITTED_BYTES.

    Raises TickNotReached if there are more, and what the log raises.
    """
    found: dict[str, list[pa.Table]] = {}
    left = UNCOMMITTED_BYTES
    for name, tick in ticks.items():
        try:
            found[name] = _uncommitted(settings, client, name, collection_id, tick, left)
        except PositionTruncated:  # the table has taken it meanwhile, so that the replay starts later now
            found[name] = _uncommitted(settings, client, name, collection_id, tick, left)
        left -= sum(each.nbytes for each in found[name])
    return found


def _uncommitted(
    settings: Settings, client: TickSource, pchannel: str, collection_id: int, tick: int, max_bytes: int
) -> list[pa.Table]:
    found: list[pa.Table] = []
    for messages, through in UncommittedMessages(settings.wal_uri, client.service)(pchannel):
        found.append(pa.Table.from_batches([messages_of(collection_id, messages)]))
        if sum(each.nbytes for each in found) > max_bytes:
            raise TickNotReached(
                f"the tables lack more than {UNCOMMITTED_BYTES >> 20} MiB of the collection, and no streaming node"
                " runs: start one (`millrace jobs run`), or read at an older tick"
            )
        if through >= tick:
            break
    return found


def require_confirmed_ticks(
    settings: Settings,
    name: str,
    pchannels: Sequence[str],
    client: TickSource,
    at: int | None,
    seconds: float,
    *,
    from_log: bool = False,
) -> dict[str, int]:
    """Return the ticks of :func:`confirm_ticks`. Raises TickNotReached if a PChannel is not complete in time."""
    began = time.monotonic()
    confirmed = confirm_ticks(settings, pchannels, client, at=at, seconds=seconds, from_log=from_log)
    if confirmed.missing:
        waited = time.monotonic() - began
        raise TickNotReached(f"{name!r} cannot be read in full after {waited:.1f} s: {confirmed.missing}")
    return confirmed.ticks


def lacks_rows(wal: WalTable | None, log: Log, pchannel: str, *, up_to: int = MAX_TICK) -> bool:
    """Return whether the log has an entry that becomes a message of a tick <= `up_to` and that `wal` lacks.

    Without `up_to`, rejections count too. TimeTick messages do not count: they tell nothing of rows. If the log is
    truncated meanwhile, `wal` has what was removed (truncation requires that), so it is refreshed and the check
    repeated.
    """
    while True:
        position = None if wal is None else wal.position(pchannel)
        if position is not None and position.last_tick >= up_to:
            return False
        try:
            return _lacks(position, log, pchannel, up_to)
        except PositionTruncated:
            if wal is None or position is None:
                return True
            wal.refresh()
            if wal.commits(pchannel) == position.commits:
                return True  # the log lost entries that the table never had: the streaming node will report it


def lag_seconds(wal: WalTable | None, log: Log, pchannel: str) -> float:
    """Return the age of the oldest entry that `wal` lacks; 0.0 if it lacks only time ticks without news."""
    while lacks_rows(wal, log, pchannel):
        position = (None if wal is None else wal.position(pchannel).position) or EARLIEST
        try:
            entries = log.read(max(position, log.describe().begin), max_bytes=1)
        except PositionTruncated:
            continue
        if entries.batch.num_rows:
            return round(max(0.001, time.time() - entries.batch["physical_ms"][0].as_py() / 1e3), 3)
        break
    return 0.0


def _lacks(position: WalPosition | None, log: Log, pchannel: str, up_to: int) -> bool:
    """Check one position. Raises PositionTruncated if the log begins after it."""
    state = (None if position is None else position.state) or ChannelState.new(pchannel)
    end = log.end()
    while state.position < end and state.last_tick < up_to:
        entries = log.read(state.position, end=end, max_bytes=PEEK_BYTES)
        if entries.batch.num_rows == 0:
            return False
        try:
            outcome = Chain().process(state, entries)
        except Exception:  # an entry that parks the PChannel is not in the table either
            return True
        if up_to == MAX_TICK and outcome.rejections.num_rows:
            return True
        news = outcome.messages.filter(pc.not_equal(outcome.messages["type"].cast(pa.utf8()), "TIME_TICK"))
        if news.num_rows and news["time_tick"][0].as_py() <= up_to:
            return True
        state = outcome.state
    return False
