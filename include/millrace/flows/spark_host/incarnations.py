"""What is kept of a declared stream over its runs: ``<data>/streams/<name>/``.

``state.json`` names the running *incarnation*, where it began, the declaration that made its checkpoint, and whether
the stream is paused. Each incarnation has its own checkpoint ``<number>/`` with Spark's state and the sink's memory. A
replay, or an upgrade without state, is a new incarnation; the previous checkpoint stays until the new one has begun.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Self

from millrace.base.errors import InvalidStream, StreamBusy, UnsupportedVersion
from millrace.base.files import make_folder, replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.flow import Flow
from millrace.flows.sources.collection.model import CollectionSource

FOLDER: Final = "millrace-sink"
"""Beside Spark's own folders in a query's checkpoint: what a sink remembers goes with it."""
VERSION: Final = 1
"""Of state.json; one without a version is of an earlier build, and is read as version 1."""


def sink_folder(checkpoint: Path) -> Path:
    """Return where the sink of the query with this checkpoint remembers what it took."""
    return checkpoint / FOLDER


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
    """What state.json says."""

    incarnation: int = 1
    fingerprint: str = ""
    """Of the declaration that the checkpoint was made by; empty: nothing has run yet."""
    begun: Begun = Begun()
    paused: bool = False
    handed: bool = False
    """Whether the sink got a micro-batch of the incarnation. Until then another declaration replaces it."""


class Kept:
    """The folder of one stream."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = name
        self.folder = settings.data_dir / "streams" / name

    @property
    def state(self) -> State:
        try:
            value: dict[str, Any] = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return State()
        if value.get("version", VERSION) > VERSION:
            raise UnsupportedVersion(
                f"the state of stream {self.name} has version {value['version']}, and this build supports {VERSION}:"
                " run the newer build"
            )
        return State(
            value["incarnation"],
            value["fingerprint"],
            Begun(**value["begun"]),
            value["paused"],
            value.get("handed", True),
        )

    def checkpoint(self, state: State) -> Path:
        """The checkpoint of the incarnation."""
        return self.folder / str(state.incarnation)

    def locked(self) -> Lock:
        """Hold the stream: who runs it, or changes its state. Raises StreamBusy while another process does."""
        make_folder(self.folder)
        return Lock(self.folder / "lock", self.name)

    def keep(self, state: State) -> None:
        replace_json(self.folder / "state.json", {"version": VERSION, **asdict(state)}, synced=True)

    def pause(self, *, paused: bool) -> None:
        """Say that it is not to run, or may. Who runs it looks when it starts; stopping it is the launcher's."""
        make_folder(self.folder)
        self.keep(replace(self.state, paused=paused))

    def admitted(self, stream: Flow) -> State:
        """Return the state to run `stream` by; call it with the lock held.

        Raises InvalidStream if it is paused, or if another declaration has given rows to the sink with its checkpoint.
        """
        state, mine = self.startable(stream), stream.fingerprint()
        if state.fingerprint != mine:
            shutil.rmtree(self.checkpoint(state), ignore_errors=True)  # of a declaration that gave its sink nothing
            state = replace(state, fingerprint=mine)
            self.keep(state)
        return state

    def hand(self) -> None:
        """Note, before a micro-batch is handed to the sink, that the checkpoint holds something. With the lock held."""
        state = self.state
        if not state.handed:
            self.keep(replace(state, handed=True))

    def startable(self, stream: Flow) -> State:
        """The same without the lock, and nothing is kept: whether it would be admitted now."""
        state = self.state
        if state.paused:
            raise InvalidStream(f"the stream {self.name!r} is paused: `millrace flows resume {self.name}`")
        if state.handed and state.fingerprint not in ("", stream.fingerprint()):
            raise InvalidStream(
                f"the declaration of stream {self.name!r} changed since it ran last:"
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
        """Begin anew elsewhere, by a new checkpoint. Raises StreamBusy, InvalidStream for a snapshot of a topic."""
        if begun.snapshot is not None and not isinstance(stream.row_source, CollectionSource):
            raise InvalidStream(f"the stream {stream.name!r} reads topics, which have no snapshot: replay after a time")
        with self.locked():
            return self._next(replace(self.state, fingerprint=stream.fingerprint()), begun)

    def move(self, stream: Flow, positions: Mapping[str, int]) -> dict[str, int]:
        """Begin anew at the position of today, but for the lanes in `positions`, by a new checkpoint; return all.

        Raises StreamBusy, InvalidStream if the stream has not reached a position yet, or for a lane that it does not
        have.
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
        old = self.folder / str(state.incarnation - 1)
        state = replace(state, incarnation=state.incarnation + 1, begun=begun, handed=False)
        shutil.rmtree(self.checkpoint(state), ignore_errors=True)  # of a beginning that was not kept
        self.keep(state)
        shutil.rmtree(old, ignore_errors=True)
        return state


class Lock:
    """An exclusive hold on a stream, until it is closed or the process ends."""

    def __init__(self, path: Path, name: str) -> None:
        self._file: IO[bytes] = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StreamBusy(f"the stream {name!r} runs in another process: stop it first") from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def newest_batch(checkpoint: Path) -> int:
    """Return the number of the last completed micro-batch; -1 before the first."""
    return max((int(path.name) for path in (checkpoint / "commits").glob("[0-9]*")), default=-1)


def newest_offsets(checkpoint: Path) -> int:
    """Return the number of the last micro-batch that was begun; -1 before the first."""
    return max((int(path.name) for path in (checkpoint / "offsets").glob("[0-9]*")), default=-1)


def again_of(checkpoint: Path, batch: int) -> int:
    """Return the number of the last redrive of the source's letters that was read up to a micro-batch."""
    try:
        lines = (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return 0 if lines[2] == "-" else int(json.loads(lines[2]).get("again", 0))  # "-": Spark asked it for nothing yet


def position(checkpoint: Path) -> dict[str, int] | None:
    """Return, by lane, the position that the last completed micro-batch reached, from Spark's checkpoint.

    A lane is a PChannel with its tick, or a topic's partition with its offset.

    None without one, and for an incomplete snapshot: there is no tick after which to continue.
    """
    newest = newest_batch(checkpoint)
    if newest < 0:
        return None
    lines = (checkpoint / "offsets" / str(newest)).read_text(encoding="utf-8").splitlines()
    place = json.loads(lines[2])
    if "offsets" in place:
        return {str(lane): int(offset) for lane, offset in place["offsets"].items()}
    if place.get("snapshot") and place["given"] < place["snapshot"]:
        return None
    return {str(name): int(tick) for name, tick in place["ticks"].items()}
