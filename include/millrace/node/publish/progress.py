"""The tick up to which the inner tables hold everything of a collection: the newest tick that can be published.

A PChannel's checkpoint says up to where its rows are in the tables. Beyond it, messages of other collections and time
ticks do not matter: a VChannel is whole up to its first message in ``wal`` after the checkpoint, and without one up to
where ``wal`` is complete. The ``wal`` of an idle PChannel does not move, so the log is asked, as readers do
(millrace.tables.read.freshness): without that, one idle PChannel would keep all rows of the others unpublished.

Only the collections that the flusher names in its commits to ``checkpoints`` are looked at. Changes by others
(compaction, recovery) are found by the marks of the tables' logs, for all collections once every SWEEP_SECONDS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.client.append_client import AppendClient
from millrace.message.ids import pchannel_of
from millrace.storage.delta_log import COMMIT_INFO_KEY, read_actions
from millrace.storage.table import TableHandle, open_table
from millrace.tables.collections.flush_tables import CHANGED_INFO, Checkpoint, read_checkpoints
from millrace.tables.read.freshness import confirm_ticks
from millrace.tables.wal.reader import WalSnapshot, read_range
from millrace.wal.visible.catalog import VChannelInfo, WalCatalog

CONFIRM_SECONDS: Final = 2.0
"""Time that a look waits for the streaming node to take what the log has. Later looks continue."""

_TICK: Final = "TIME_TICK"

ConfirmTicks: TypeAlias = Callable[[Sequence[str]], Mapping[str, int]]
"""Returns by PChannel the tick up to which ``wal`` is complete, for those that can say."""


class LogTicks:
    """Asks the append host, which appends a tick to a PChannel. Implements ConfirmTicks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: AppendClient | None = None

    def __call__(self, pchannels: Sequence[str]) -> Mapping[str, int]:
        try:
            if self._client is None:
                self._client = AppendClient.connect(self._settings.data_dir, start=False, deadline=CONFIRM_SECONDS)
            return confirm_ticks(self._settings, pchannels, self._client, seconds=CONFIRM_SECONDS).ticks
        except MillraceError:  # no host runs: what the tables say counts
            self.close()
            return {}

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        if self._client is not None:
            self._client.close()
            self._client = None


@dataclass(frozen=True, slots=True)
class TablesProgress:
    """Progress of the inner tables, at one look."""

    collections: Mapping[int, Mapping[str, VChannelInfo]]
    """The VChannels of each collection, by name, as of their checkpoints."""
    checkpoints: Mapping[str, int]
    """Tick of each PChannel's checkpoint."""
    waiting: Mapping[str, int]
    """For each VChannel, the tick of the first message in ``wal`` that the tables lack."""
    whole: Mapping[str, int]
    """For each PChannel, the tick up to which ``wal`` is complete."""

    def tick(self, collection_id: int) -> int:
        """Return the tick up to which the tables hold everything of a collection; 0 if a VChannel is unknown.

        It is never beyond :meth:`newest`: an idle PChannel is asked only if it holds rows back, and a later look that
        does not ask must not find an earlier tick.
        """
        infos = self.collections.get(collection_id, {})
        names = next((info.vchannels for info in infos.values()), ())
        whole = min((self._tick(name) if name in infos else 0 for name in names), default=0)
        return min(whole, self.newest(collection_id))

    def newest(self, collection_id: int) -> int:
        """Return the newest checkpoint of the collection's PChannels: its tables have nothing after it."""
        return max((self.checkpoints.get(name, 0) for name in self.pchannels(collection_id)), default=0)

    def pchannels(self, collection_id: int) -> list[str]:
        """Return the PChannels of a collection's VChannels, sorted."""
        infos = self.collections.get(collection_id, {})
        return sorted({pchannel_of(name) for info in infos.values() for name in info.vchannels})

    def _tick(self, vchannel: str) -> int:
        whole = self.whole.get(pchannel_of(vchannel), 0)
        return min(whole, self.waiting[vchannel] - 1) if vchannel in self.waiting else whole


@dataclass(slots=True)
class _Decoded:
    tick: int
    catalog: WalCatalog


@dataclass(slots=True)
class ProgressReader:
    """Looks at ``checkpoints`` and ``wal``. Opens no table of a collection. One thread at a time."""

    settings: Settings
    confirm: ConfirmTicks
    changed: set[int] = field(default_factory=set)
    """Collections that the flusher changed since the last :meth:`take_changed`."""
    missed: bool = False
    """Whether commits to ``checkpoints`` were not seen, so that `changed` is incomplete."""
    _checkpoints: TableHandle | None = None
    _wal: WalSnapshot | None = None
    _seen: int = -1
    _read: dict[str, Checkpoint] = field(default_factory=dict)
    _catalogs: dict[str, _Decoded] = field(default_factory=dict)
    _collections: dict[int, dict[str, VChannelInfo]] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Go to the newest checkpoints and note what changed. Returns whether they moved. Nearly free otherwise."""
        if self._checkpoints is None:
            self._checkpoints = open_table(self.settings.checkpoints_uri)
            if self._checkpoints is None:
                return False
        else:
            self._checkpoints.poll()
        table = self._checkpoints
        if table.version == self._seen:
            return False
        self.missed |= self._seen < 0  # what there is at the start
        for version in range(self._seen + 1, table.version + 1) if self._seen >= 0 else ():
            named = _changed_in(table, version)
            self.missed |= named is None
            self.changed |= named or set()
        self._seen = table.version
        self._read = read_checkpoints(table)
        moved = False
        for name, checkpoint in self._read.items():
            known = self._catalogs.get(name)
            if known is None or known.tick != checkpoint.time_tick:
                self._catalogs[name] = _Decoded(checkpoint.time_tick, checkpoint.catalog)
                moved = True
        if moved:
            self._collections = {}
            for each in self._catalogs.values():
                for vchannel, info in each.catalog.vchannels.items():
                    self._collections.setdefault(info.collection_id, {})[vchannel] = info
        return True

    def collections(self) -> list[int]:
        """Return the ids of all collections that the checkpoints know."""
        return sorted(self._collections)

    def look(self, collections: Iterable[int]) -> TablesProgress:
        """Return how far the tables are, asking the log for the PChannels that keep one of `collections` back."""
        found = self._progress({})
        behind: set[str] = set()
        for number in collections:
            target = found.newest(number)
            behind |= {name for name in found.pchannels(number) if found.whole.get(name, 0) < target}
        if not behind:
            return found
        # The log first, then `wal`: what `wal` lacks at the ticks asked for would be taken for confirmed otherwise.
        confirmed = self.confirm(sorted(behind))
        return self._progress(confirmed) if confirmed else found

    def _progress(self, confirmed: Mapping[str, int]) -> TablesProgress:
        self._wal = WalSnapshot.open(self.settings.wal_uri) if self._wal is None else self._wal.refreshed()
        wal = self._wal
        ticks = {name: each.time_tick for name, each in self._read.items()}
        waiting: dict[str, int] = {}
        whole = dict(ticks)
        for name, tick in ticks.items():
            if wal is not None:
                whole[name] = max(tick, wal.last_tick(name), confirmed.get(name, 0))
                waiting |= _waiting(wal, name, tick)
        return TablesProgress(self._collections, ticks, waiting, whole)


def _waiting(wal: WalSnapshot, pchannel: str, after: int) -> dict[str, int]:
    """Return by VChannel the tick of its first message after `after`. Time ticks do not count."""
    found: dict[str, int] = {}
    planned = wal.plan(pchannel, after_tick=after)
    for rows in read_range(wal.store, planned, columns=["type", "vchannel", "time_tick"]):
        rows = rows.filter(pc.not_equal(rows["type"].cast(pa.utf8()), _TICK))
        named = pa.table({"vchannel": rows["vchannel"].cast(pa.utf8()), "time_tick": rows["time_tick"]})
        for row in named.group_by("vchannel").aggregate([("time_tick", "min")]).to_pylist():
            found.setdefault(row["vchannel"], row["time_tick_min"])
    return found


def _changed_in(table: TableHandle, version: int) -> set[int] | None:
    """Return the collections that one commit to ``checkpoints`` names; None if the log does not have it."""
    actions = read_actions(table.store, version)
    if actions is None:
        return None
    found: set[int] = set()
    for action in actions:
        said: Any = action.get("commitInfo", {}).get(COMMIT_INFO_KEY, {})
        info: Mapping[str, Any] = json.loads(said) if isinstance(said, str) else said
        for key, numbers in info.items():
            if key.startswith(CHANGED_INFO):
                found |= set(numbers)
    return found
