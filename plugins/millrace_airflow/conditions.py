"""The conditions of the sensors, as functions of the settings.

They run in workers and in the triggerer, and change nothing.

Each returns whether it is met, the findings, and a description of the progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from millrace.base.settings import Settings


@dataclass(frozen=True, slots=True)
class ConditionResult:
    """Whether a condition is met, the progress in words, and the findings."""

    met: bool
    words: str
    found: dict[str, Any] = field(default_factory=dict)


def check(name: str, settings: Settings, arguments: Mapping[str, Any]) -> ConditionResult:
    """Evaluate the condition `name` once. Raises MillraceError, and ValueError for an unknown name."""
    if name not in _CONDITIONS:
        raise ValueError(f"no condition {name!r}; conditions are {', '.join(_CONDITIONS)}")
    return _CONDITIONS[name](settings, **arguments)


def tick_reached(settings: Settings, *, tick: int, pchannel: str | None = None) -> ConditionResult:
    """Check that the ``wal`` table holds everything up to `tick`, of one PChannel or of all.

    It reads only the table: on an idle PChannel it is met only with the next message (:func:`fresh_as_of` also asks the
    log).
    """
    from millrace.base.errors import ChannelNotFound
    from millrace.storage.table import open_table
    from millrace.tables.wal.table import WalTable

    opened = open_table(settings.wal_uri)
    if opened is None:
        return ConditionResult(False, "there is no wal table yet")
    table = WalTable(opened)
    names = table.pchannels()
    if pchannel is not None:
        if pchannel not in names:
            raise ChannelNotFound(
                f"the wal table has nothing of {pchannel!r}; it has {', '.join(sorted(names)) or 'none'}"
            )
        names = [pchannel]
    ticks = {name: _tick(table, name) for name in names}
    behind = {name: reached for name, reached in ticks.items() if reached < tick}
    words = f"{len(ticks) - len(behind)} of {len(ticks)} PChannels have reached tick {tick}"
    return ConditionResult(bool(ticks) and not behind, words, {"ticks": ticks})


def _tick(table: Any, name: str) -> int:
    position = table.position(name)
    return 0 if position is None else int(position.last_tick)


def lag_below(settings: Settings, *, seconds: float) -> ConditionResult:
    """Check that the ``wal`` table lacks only log entries younger than `seconds`, on each unparked PChannel."""
    from millrace.base.errors import LogUnavailable
    from millrace.observe.observer import Observer

    with closing(Observer(settings)) as observer:
        overview = observer.overview()
    if not overview.log_server:
        raise LogUnavailable("the log's server does not run, so the lag of the wal table is unknown")
    lags = {each.name: each.lag_seconds or 0.0 for each in overview.pchannels if not each.parked}
    most = max(lags.values(), default=0.0)
    return ConditionResult(
        most < seconds, f"the lag is {most:.1f} s; waiting for less than {seconds:g} s", {"lag_seconds": lags}
    )


def segments_in_state(
    settings: Settings, *, collection: str, state: str = "flushed", count: int = 1, after_tick: int = 0
) -> ConditionResult:
    """Check that at least `count` segments of a collection came into `state` after `after_tick`."""
    import pyarrow.compute as pc

    from millrace.commands.parts.command_line import find_collection
    from millrace.storage.table import open_table
    from millrace.tables.collections.flush_tables import read_segments

    number = find_collection(settings, collection).id
    rows = read_segments(open_table(settings.segments_uri))
    chosen = rows.filter(
        (pc.field("collection_id") == number) & (pc.field("state") == state) & (pc.field("time_tick") > after_tick)
    )
    words = f"{chosen.num_rows} of {count} segments of {collection} are {state}"
    found = {"segments": chosen["segment_id"].to_pylist(), "rows": sum(chosen["rows"].to_pylist())}
    return ConditionResult(chosen.num_rows >= count, words, found)


def fresh_as_of(settings: Settings, *, collection: str, tick: int) -> ConditionResult:
    """Check that a read of a collection at `tick` is complete: its PChannels have no pending entries up to `tick`.

    It asks the log, so idle PChannels do not delay it.
    """
    from millrace.client.database import connect
    from millrace.tables.read.freshness import confirm_ticks

    with connect(settings=settings, start=False) as db:
        confirmed = confirm_ticks(settings, db.definition(collection).pchannels, db.connection, at=tick, seconds=0.0)
    lacking = f": {confirmed.missing}" if confirmed.missing else ""
    words = f"{collection} is {'not yet ' if lacking else ''}whole at tick {tick}{lacking}"
    return ConditionResult(not lacking, words, {"ticks": confirmed.ticks})


_CONDITIONS: Final[dict[str, Callable[..., ConditionResult]]] = {
    "tick_reached": tick_reached,
    "lag_below": lag_below,
    "segments_in_state": segments_in_state,
    "fresh_as_of": fresh_as_of,
}
