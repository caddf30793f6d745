"""How far a collection can be read, by the log's word too: a PChannel on which nothing happens does not hold a read back.

The ``wal`` table's tick of an idle PChannel stands still, since a tick without news becomes no row. So a reader has a tick
appended on each PChannel and asks whether the log holds any row up to that tick that the table lacks; where it does not, the
table is whole up to there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.deadline import Deadline
from millrace.base.errors import MillraceError, PositionTruncated, TickNotReached
from millrace.base.settings import Settings
from millrace.log.protocol import Log, LogService
from millrace.message.ids import EARLIEST, tick_physical_ms
from millrace.rpc.selection import ALL_ROWS, Selection
from millrace.storage.table import open_table
from millrace.tables.read.arrow import read_arrow
from millrace.tables.read.plan import ReadPlan, plan_read
from millrace.tables.wal.table import WalPosition, WalTable
from millrace.wal.chain import Chain
from millrace.wal.state import ChannelState

PEEK_BYTES: Final = 256 << 10
MAX_TICK: Final = (1 << 63) - 1

_POLL_SECONDS: Final = 0.02
_TICK_SECONDS: Final = 0.5
"""Pause between two ticks while a read waits for one that lies ahead."""


class TickSource(Protocol):
    """A client of the append host (millrace.client.append_client.AppendClient), or what has a host and its log at hand."""

    @property
    def service(self) -> LogService: ...

    def tick(self, pchannel: str) -> int: ...


class ConfirmedTicks(NamedTuple):
    """How far the ``wal`` table is whole."""

    ticks: dict[str, int]
    """By PChannel the tick up to which it is."""
    missing: str
    """What a read still waits for, and how to get it; empty if there is nothing."""


def confirm_ticks(
    settings: Settings, pchannels: Sequence[str], client: TickSource, *, at: int | None = None, seconds: float
) -> ConfirmedTicks:
    """By PChannel of a collection the tick up to which the ``wal`` table is whole; and what is missing.

    Waits up to `seconds` for the streaming job, and for the tick `at` to come; without one, for all that was decided on any of
    the PChannels before the call. Returns at once if `at` lies further ahead than `seconds`. A PChannel that cannot be
    asked (parked, say) is left out, and a read knows of it what the table says.
    """
    end = Deadline.after(seconds)
    ticks: dict[str, int] = {}
    whole: dict[str, int] = {}
    unasked: dict[str, MillraceError] = {}
    """By PChannel why its tick is not known."""
    lacking: dict[str, tuple[int, int]] = {}
    """By PChannel (version of the table, tick) of which it is known that rows lack: as long as neither moves, nobody looks again."""
    target = at or 0
    wal: WalTable | None = None
    while True:
        if wal is not None:
            wal.refresh()
        elif (table := open_table(settings.wal_uri)) is not None:
            wal = WalTable(table)
        for name in pchannels:
            try:
                if ticks.get(name, 0) < max(1, target):
                    ticks[name] = client.tick(name)
                    unasked.pop(name, None)
            except MillraceError as error:
                unasked[name] = error
        if at is None and not target:
            target = max(ticks.values(), default=0)  # of one clock, but ticks of one millisecond differ by channel
        for name in ticks:
            try:
                wanted = (
                    ticks[name] if at is None else min(ticks[name], at)
                )  # what comes behind `at` is none of the read's
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
    """Seconds until the log's clock has come to `at`; above 0.0 if a tick of these has not."""
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
        return f"the tick {at} lies {ahead:,.1f} s ahead of the log's clock: read later, or without a tick"
    name = next((each for each in pchannels if each in unasked and each not in whole), None)
    if name is not None:
        return f"{name} cannot be asked for its tick ({unasked[name].code}: {unasked[name]}): mend that (`millrace status`)"
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
) -> pa.Table:
    """The selected rows of a collection at `at`; without it all that was decided before the call, as soon as the tables have it.

    Raises TickNotReached where they do not within `seconds`, and what :func:`millrace.tables.read.arrow.read_arrow` raises.
    """
    confirmed = require_confirmed_ticks(settings, name, pchannels, client, at, seconds)
    return read_arrow(settings, collection_id, at=at, deadline=0.0, confirmed=confirmed, selection=selection)


def plan_fresh(
    settings: Settings,
    name: str,
    collection_id: int,
    pchannels: Sequence[str],
    client: TickSource,
    *,
    at: int | None,
    seconds: float,
) -> ReadPlan:
    """What :func:`read_fresh` would read, pinned: for :func:`millrace.tables.read.arrow.read_pieces`."""
    confirmed = require_confirmed_ticks(settings, name, pchannels, client, at, seconds)
    return plan_read(settings, collection_id, at=at, deadline=0.0, confirmed=confirmed)


def require_confirmed_ticks(
    settings: Settings, name: str, pchannels: Sequence[str], client: TickSource, at: int | None, seconds: float
) -> dict[str, int]:
    """What :func:`confirm_ticks` says of a collection's PChannels. Raises TickNotReached where it is not so for each in time."""
    began = time.monotonic()
    confirmed = confirm_ticks(settings, pchannels, client, at=at, seconds=seconds)
    if confirmed.missing:
        waited = time.monotonic() - began
        raise TickNotReached(f"{name!r} cannot be read in full after {waited:.1f} s: {confirmed.missing}")
    return confirmed.ticks


def lacks_rows(wal: WalTable | None, log: Log, pchannel: str, *, up_to: int = MAX_TICK) -> bool:
    """Whether the log has an entry that becomes a message of a tick <= `up_to` (or, without it, a rejection) that `wal` lacks.

    A TimeTick is no such message: it says nothing of any row. Where the log is truncated meanwhile, `wal` has what went (that is
    asked of truncation): it is refreshed, and the question put again.
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
                return True  # what the table never had is gone from the log: the streaming node will say so


def lag_seconds(wal: WalTable | None, log: Log, pchannel: str) -> float:
    """The age of the oldest entry that `wal` lacks; 0.0 where all that is behind it are time ticks without news."""
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
    """Raises PositionTruncated where the log begins behind `position`."""
    state = (None if position is None else position.state) or ChannelState.new(pchannel)
    end = log.end()
    while state.position < end and state.last_tick < up_to:
        entries = log.read(state.position, end=end, max_bytes=PEEK_BYTES)
        if entries.batch.num_rows == 0:
            return False
        try:
            outcome = Chain().process(state, entries)
        except Exception:  # what parks the PChannel is not in the table either
            return True
        if up_to == MAX_TICK and outcome.rejections.num_rows:
            return True
        news = outcome.messages.filter(pc.not_equal(outcome.messages["type"].cast(pa.utf8()), "TIME_TICK"))
        if news.num_rows and news["time_tick"][0].as_py() <= up_to:
            return True
        state = outcome.state
    return False
