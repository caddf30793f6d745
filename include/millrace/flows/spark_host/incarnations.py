"""The stored state of a declared stream across its runs.

The *state* names the running incarnation, its start, the declaration of its checkpoint, the checkpoint's place, and
whether the stream is paused. Each incarnation has its own checkpoint ``<number>/`` with Spark's state and the sink's
memory. A replay, or an upgrade without state, is a new incarnation; the previous checkpoint stays until the new one has
begun.

- Checkpoints, and the files next to them, are in ``<tables>/streams/<name>/`` if the tables are on S3, else in
  ``<data>/streams/<name>/``.
- The state is a key of the meta store that the settings name, else ``<data>/streams/<name>/state.json``.

So with S3 and a meta store a driver may start on any machine, with an empty data folder. With a meta store a lease
protects the stream, and a driver that lost it passes no micro-batch to the sink. A checkpoint in another place, because
an earlier build made it or the tables were moved, is copied when the stream starts; the state says which copy counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self, overload

from millrace.base.deadline import Deadline, poll_until
from millrace.base.errors import InvalidSettings, InvalidStream, MetaUnavailable, StreamBusy, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.hold import process_store
from millrace.flows.sinks.memory import Folder, below, keep_note, read_note
from millrace.flows.sources.collection.model import CollectionSource
from millrace.runtime.periodic import PeriodicTask
from millrace.storage.store import list_below, put_stream, store_at

if TYPE_CHECKING:
    from millrace.coord.lease import LeasedKey

STREAMS: Final = "streams"
"""Folder of the streams, in the data folder and below the tables; prefix of their keys in a meta store."""
FOLDER: Final = "millrace-sink"
"""The folder of the sink's memory, next to Spark's own folders in a query's checkpoint."""
STATE: Final = "state.json"
LOCK: Final = "lock"
VERSION: Final = 2
"""The version of a state. Version 1, or none, means that the checkpoint is in the data folder; such a state is still
written so."""
_IN_FOLDER: Final = 1
_META_STORE: Final = "meta_store"
"""The field of an old state file that names the meta store with the state."""


@overload
def sink_folder(checkpoint: Path) -> Path: ...
@overload
def sink_folder(checkpoint: Folder) -> Folder: ...
def sink_folder(checkpoint: Folder) -> Folder:
    """Return the folder of the sink's memory for the query with this checkpoint."""
    return below(checkpoint, FOLDER)


@dataclass(frozen=True, slots=True)
class Begun:
    """The start of an incarnation: after a tick, with a snapshot at one, after `ticks` by lane, or as declared.

    The tick of a lane that is a topic's partition is its offset.
    """

    after: int | str | None = None
    snapshot: int | str | None = None
    ticks: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The content of state.json."""

    incarnation: int = 1
    fingerprint: str = ""
    """The fingerprint of the checkpoint's declaration; empty if nothing has run yet."""
    begun: Begun = Begun()
    paused: bool = False
    handed: bool = False
    """Whether the sink received a micro-batch of the incarnation. Until then another declaration replaces it."""
    place: str = ""
    """URI of the folder with the checkpoints; empty for the stream's folder in the data folder."""

    def encode(self) -> dict[str, Any]:
        """Return it as JSON."""
        value = {"version": VERSION if self.place else _IN_FOLDER, **asdict(self)}
        if not self.place:
            del value["place"]
        return value

    @classmethod
    def decode(cls, value: Mapping[str, Any], name: str) -> Self:
        """Decode a state of stream `name`. Raises UnsupportedVersion if a newer build wrote it."""
        if value.get("version", _IN_FOLDER) > VERSION:
            raise UnsupportedVersion(
                f"the state of stream {name} has version {value['version']}, and this build supports {VERSION}:"
                " run the newer build"
            )
        return cls(
            value["incarnation"],
            value["fingerprint"],
            Begun(**value["begun"]),
            value["paused"],
            value.get("handed", True),
            value.get("place", ""),
        )


def require_reachable(settings: Settings, name: str) -> None:
    """Raise InvalidSettings if executors need the stream's checkpoint but share no folder with the driver."""
    if settings.spark_environment and isinstance(Incarnations(settings, name).home, Path):
        raise InvalidSettings(
            f"the checkpoint of stream {name!r} would lie in {settings.data_dir / STREAMS}, which executors with"
            " MILLRACE_SPARK_ENVIRONMENT do not reach: put the tables on S3 (MILLRACE_TABLES=s3://bucket/prefix), or"
            " run the stream without MILLRACE_SPARK_MASTER"
        )


class Incarnations:
    """The stored state and checkpoints of one stream."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = name
        self._settings = settings
        self._local = settings.data_dir / STREAMS / name
        on_s3 = settings.tables_uri.startswith("s3://")
        self.home: Folder = f"{settings.tables_uri}/{STREAMS}/{name}" if on_s3 else self._local
        """The folder of the checkpoints by the settings."""
        self._shared = bool(settings.meta_store)
        self._key = state_key(name)
        self._handed = False
        """Whether :meth:`hand` has stored it, in the process that holds the stream."""

    @property
    def folder(self) -> Folder:
        """The present folder of the checkpoints and the files next to them."""
        return self.state.place or self._local

    @property
    def state(self) -> State:
        """The state. Raises UnsupportedVersion, MetaUnavailable."""
        return self._read()[0]

    def _read(self) -> tuple[State, int]:
        """Return the state, and its revision in the meta store."""
        if self._shared:
            found = process_store(self._settings.meta_store).get(self._key)
            if found is not None:
                return State.decode(json.loads(found.value), self.name), found.modified
        value = read_note(self._local, STATE)  # with a meta store, from an earlier build
        if value is not None and _META_STORE in value:
            raise InvalidStream(
                f"the state of stream {self.name!r} is in the meta store {value[_META_STORE]}: set MILLRACE_META_STORE"
            )
        return State() if value is None else State.decode(value, self.name), 0

    def _change(self, changed: Callable[[State], State]) -> State:
        """Replace the state by what `changed` returns for it. Raises MetaUnavailable."""
        if not self._shared:
            state = changed(self._read()[0])
            keep_note(self._local, STATE, state.encode())
            return state
        from millrace.meta.store import Put, RevisionEquals

        store = process_store(self._settings.meta_store)
        while True:
            state, revision = self._read()
            state = changed(state)
            put = Put(self._key, json.dumps(state.encode()).encode())
            if store.commit([put], when=[RevisionEquals(self._key, revision)]) is not None:
                break
        if (
            not revision and (self._local / STATE).exists()
        ):  # an earlier build, or one without the meta store, must not use it
            keep_note(self._local, STATE, {"version": VERSION, _META_STORE: self._settings.meta_store})
        return state

    def checkpoint(self, state: State) -> Folder:
        """Return the checkpoint of the incarnation."""
        return below(state.place or self._local, str(state.incarnation))

    def locked(self) -> Lock:
        """Hold the stream, to run it or change its state. Raises StreamBusy while another process holds it."""
        make_folder(self._local)
        lock = Lock(self._local / LOCK, self.name)
        if self._shared:
            try:
                lock.lease = _Lease(self._settings, self.name)
            except BaseException:
                lock.close()
                raise
        return lock

    def keep(self, state: State) -> None:
        self._change(lambda _: state)

    def pause(self, *, paused: bool) -> None:
        """Set whether the stream is paused. A process checks it at its start; the launcher stops a running one."""
        make_folder(self._local)
        self._change(lambda state: replace(state, paused=paused))

    def admitted(self, stream: Flow) -> State:
        """Return the state with which to run `stream`. Call it with the lock held.

        Raises InvalidStream if it is paused, or if its checkpoint belongs to another declaration that has written to
        the sink.
        """
        state, mine = self.startable(stream), stream.fingerprint()
        if state.fingerprint != mine:
            remove_folder(self.checkpoint(state))  # its declaration wrote nothing to the sink
            state = self._change(lambda found: replace(found, fingerprint=mine))
        return self._at_home(state)

    def _at_home(self, state: State) -> State:
        """Move the checkpoints to the place of the settings. After a kill, one place or the other applies."""
        here, home = state.place or self._local, self.home
        if str(here) == str(home):
            return state
        self._claim_journals(here)
        copy_folder(here, home)
        hit("streams.copied")
        state = self._change(lambda found: replace(found, place="" if isinstance(home, Path) else home))
        hit("streams.moved")
        remove_folder(here, but={LOCK, STATE})
        return state

    def _claim_journals(self, here: Folder) -> None:
        """Take the sinks' journals below `here` from a driver that was suspended: it has not heard of the new place.

        Raises StreamBusy while it holds them on this machine.
        """
        from millrace.flows.sinks.collection.journal import FILE, FolderJournal

        for name in list_below(store_at(here)):
            folder, _, file = name.rpartition("/")
            if file == FILE:
                FolderJournal(below(here, folder), self.name).close()

    def hand(self) -> None:
        """Store, before a micro-batch is passed to the sink, that the checkpoint is in use.

        Call it with the lock held.
        """
        if not self._handed and not self.state.handed:
            self._change(lambda state: replace(state, handed=True))
        self._handed = True

    def startable(self, stream: Flow) -> State:
        """Return the state if `stream` could start now. Needs no lock and changes nothing. Raises InvalidStream."""
        state = self.state
        if state.paused:
            raise InvalidStream(f"the stream {self.name!r} is paused: `millrace flows resume {self.name}`")
        if state.handed and state.fingerprint not in ("", stream.fingerprint()):
            raise InvalidStream(
                f"the declaration of stream {self.name!r} changed since its last run:"
                f" `millrace flows upgrade {self.name} --keep-state`"
                " continues with its checkpoint (Spark refuses state that does not fit), `--fresh-state` without it"
            )
        return state

    def upgrade(self, stream: Flow, *, keep_state: bool) -> State:
        """Accept a changed declaration, with the present state, or from here without it. Raises StreamBusy."""
        with self.locked():
            state = replace(self.state, fingerprint=stream.fingerprint())
            if not keep_state:
                ticks = position(self.checkpoint(state))
                return self._next(state, state.begun if ticks is None else Begun(ticks=ticks))
            self.keep(state)
            return state

    def replay(self, stream: Flow, begun: Begun) -> State:
        """Start again at another position, with a new checkpoint.

        Raises StreamBusy, InvalidStream for a topic's snapshot.
        """
        if begun.snapshot is not None and not isinstance(stream.row_source, CollectionSource):
            raise InvalidStream(
                f"the stream {stream.name!r} reads topics, which have no snapshot: replay it after a time"
            )
        with self.locked():
            return self._next(replace(self.state, fingerprint=stream.fingerprint()), begun)

    def move(self, stream: Flow, positions: Mapping[str, int]) -> dict[str, int]:
        """Start again at the present position, except for the lanes in `positions`, with a new checkpoint; return all.

        Raises StreamBusy, InvalidStream if the stream has no position yet, or for an unknown lane.
        """
        with self.locked():
            state = replace(self.state, fingerprint=stream.fingerprint())
            known = position(self.checkpoint(state))
            if known is None:
                raise InvalidStream(f"the stream {self.name!r} has no position yet: replay it after a tick or time")
            if unknown := sorted(positions.keys() - known.keys()):
                raise InvalidStream(
                    f"{', '.join(unknown)}: no such lane of the stream {self.name!r}; it has {', '.join(sorted(known))}"
                )
            moved = {**known, **positions}
            self._next(state, Begun(ticks=moved))
            return moved

    def _next(self, state: State, begun: Begun) -> State:
        old = below(state.place or self._local, str(state.incarnation - 1))
        state = replace(state, incarnation=state.incarnation + 1, begun=begun, handed=False)
        self._handed = False
        remove_folder(self.checkpoint(state))  # an incarnation that was never stored
        self.keep(state)
        remove_folder(old)
        return state


def stored_streams(settings: Settings) -> list[str]:
    """Return the names of the streams that have stored state. Raises MetaUnavailable."""
    local = settings.data_dir / STREAMS
    names = {path.name for path in local.iterdir()} if local.is_dir() else set()
    if settings.meta_store:
        found = process_store(settings.meta_store).list(f"{STREAMS}/").entries
        names |= {each.key.split("/")[1] for each in found}
    return sorted(names)


def streams_below(settings: Settings, root: str) -> list[str]:
    """Return the streams whose checkpoints lie below `root`, a URI of an object store. Raises MetaUnavailable."""
    names = stored_streams(settings)
    return [name for name in names if Incarnations(settings, name).state.place.startswith(f"{root}/")]


def state_key(name: str) -> str:
    """Return the key of a stream's state in the meta store."""
    return f"{STREAMS}/{name}/state"


class _Lease(PeriodicTask):
    """A stream's key in the meta store, under a lease that a thread renews."""

    def __init__(self, settings: Settings, name: str) -> None:
        """Raises StreamBusy if another machine holds the stream for longer than a dead one would."""
        from millrace.coord.clock import SystemClock
        from millrace.coord.lease import LeasedKey

        super().__init__(name="stream-lease", interval=settings.session_seconds / 6)
        owner = f"{socket.gethostname()}/{os.getpid()}"
        store = process_store(settings.meta_store)
        key = f"{STREAMS}/{name}/owner"
        self._leased: LeasedKey = LeasedKey(
            store, SystemClock(), key=lambda lease: key, value=owner.encode(), seconds=settings.session_seconds
        )

        def held() -> bool:
            self._leased.step()
            return self._leased.held()

        if not poll_until(held, Deadline.after(2 * settings.session_seconds), interval=settings.session_seconds / 50):
            with suppress(MetaUnavailable):
                found = store.get(key)
                owner = "another machine" if found is None else found.value.decode()
            raise StreamBusy(f"the stream {name!r} runs in another process ({owner}): stop it first")
        self.start()

    def held(self) -> bool:
        return self._leased.held()

    def run_once(self) -> None:
        if self._leased.lease:  # a lost lease is never taken again: another process may have run the stream since
            self._leased.step()

    def close(self) -> None:
        super().close()
        self._leased.release()


class Lock:
    """An exclusive hold on a stream, until it is closed or the process ends."""

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self.lease: _Lease | None = None
        """The lease, if the stream may run on several machines."""
        self._file: IO[bytes] = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StreamBusy(f"the stream {name!r} runs in another process: stop it first") from None

    def require_held(self) -> None:
        """Raise StreamBusy if the hold was lost, so that another machine may run the stream."""
        if self.lease is not None and not self.lease.held():
            raise StreamBusy(
                f"the driver of stream {self._name!r} did not reach the meta store for too long, so another machine"
                " may run it: start the stream again"
            )

    def close(self) -> None:
        if self.lease is not None:
            self.lease.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def copy_folder(here: Folder, there: Folder) -> None:
    """Copy the files below `here` to `there`, durably, replacing its content."""
    source, target = store_at(here), store_at(there)
    remove_folder(there, but={LOCK, STATE})
    for name in list_below(source):
        if name in (LOCK, STATE) or is_checksum(name):
            continue
        with source.filesystem.open_input_stream(name) as file:
            put_stream(target, name, file)


def remove_folder(folder: Folder, *, but: frozenset[str] | set[str] = frozenset()) -> None:
    """Remove the content of `folder`, if it exists, except the files `but` directly in it."""
    if isinstance(folder, Path) and not but:
        shutil.rmtree(folder, ignore_errors=True)
    elif isinstance(folder, Path):
        for each in folder.iterdir() if folder.is_dir() else ():
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name not in but:
                each.unlink(missing_ok=True)
    else:
        store = store_at(folder)
        store.delete([name for name in list_below(store) if name not in but])


def is_checksum(name: str) -> bool:
    """Return whether a file is Hadoop's checksum of another one on a local disk."""
    last = name.rpartition("/")[2]
    return last.startswith(".") and last.endswith(".crc")


def newest_batch(checkpoint: Folder) -> int:
    """Return the number of the last completed micro-batch; -1 before the first."""
    return _newest(checkpoint, "commits")


def newest_offsets(checkpoint: Folder) -> int:
    """Return the number of the last micro-batch that was begun; -1 before the first."""
    return _newest(checkpoint, "offsets")


def _newest(checkpoint: Folder, log: str) -> int:
    return max((int(name) for name in store_at(checkpoint).list(log) if name.isdecimal()), default=-1)


def _offsets_of(checkpoint: Folder, batch: int) -> str | None:
    """Return the positions that Spark recorded for a micro-batch, or None."""
    found = store_at(checkpoint).read(f"offsets/{batch}")
    return None if found is None else found.decode().splitlines()[2]


def again_of(checkpoint: Folder, batch: int) -> int:
    """Return the number of the last redrive of the source's letters that was read up to a micro-batch."""
    place = _offsets_of(checkpoint, batch)
    return (
        0 if place in (None, "-") else int(json.loads(str(place)).get("again", 0))
    )  # "-": Spark has not asked for it yet


def position(checkpoint: Folder) -> dict[str, int] | None:
    """Return, by lane, the position that the last completed micro-batch reached, from Spark's checkpoint.

    A lane is a PChannel with its tick, or a topic's partition with its offset.

    None before the first, and for an incomplete snapshot, which has no tick after which to continue.
    """
    newest = newest_batch(checkpoint)
    if newest < 0:
        return None
    place = json.loads(_offsets_of(checkpoint, newest) or "{}")
    if "offsets" in place:
        return {str(lane): int(offset) for lane, offset in place["offsets"].items()}
    if place.get("snapshot") and place["given"] < place["snapshot"]:
        return None
    return {str(name): int(tick) for name, tick in place["ticks"].items()}
