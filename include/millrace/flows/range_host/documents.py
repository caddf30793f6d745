"""What people and crashes decide about a flow, which must outlive the machine that runs it.

    wanted.json           a pause, and restarts that somebody asked for
    skip.json             records to be put aside
    suspects/<lane>.json  ranges in which worker processes ended

Without a meta store, they are files of the flow's folder. With one, each is a key of it below
``flow-documents/<flow>/``, changed by compare-and-set, and the files are copies: a worker takes them over at its start
and once a second. So any machine changes them, and a flow that continues on another machine is still paused and still
skips its records.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from millrace.base.closeable import Closeable
from millrace.base.deadline import Deadline
from millrace.base.errors import MetaAmbiguous, MetaUnavailable
from millrace.base.files import replace_file
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.machine.tables_place import copy_place
from millrace.flows.range_host.status import FLOWS, flow_folder
from millrace.meta.store import Delete, Entry, MetaStore, Put, RevisionEquals

PREFIX: Final = "flow-documents/"
SUSPECTS: Final = "suspects"
WANTED: Final = "wanted.json"
SKIP: Final = "skip.json"
SHARED_MARK: Final = "shared"
"""File of a flow's folder whose documents are those of the meta store."""
_CHANGE_SECONDS: Final = 10.0


def change_document(settings: Settings, flow: str, name: str, change: Callable[[bytes | None], bytes | None]) -> None:
    """Replace a document with what `change` makes of it, durably; None: there is none. `change` may be called again.

    Raises MetaUnavailable, and what `change` raises.
    """
    path = flow_folder(settings, flow) / name
    if not settings.meta_store:
        _write(path, change(_read(path)), synced=True)
        return
    with DocumentCopies(settings, flow) as copies:
        copies.refresh()
        copies.change(name, change)


def forget_documents(settings: Settings, flow: str) -> None:
    """Remove the documents of a flow that is removed. Raises MetaUnavailable, MetaAmbiguous."""
    if settings.meta_store:
        with DocumentCopies(settings, flow) as copies:
            copies.forget()


def all_documents(settings: Settings) -> dict[str, dict[str, bytes]]:
    """Return the documents of all flows, by flow and name. Raises MetaUnavailable, UnsupportedVersion."""
    found: dict[str, dict[str, bytes]] = {}
    if not settings.meta_store:
        for folder in sorted((settings.data_dir / FLOWS).glob("*")):
            bodies = {name: _read(folder / name) for name in _files(folder)}
            found[folder.name] = {name: body for name, body in bodies.items() if body is not None}
        return found
    from millrace.coord.store_factory import open_cluster_store

    with open_cluster_store(settings, SystemClock()) as store:
        for each in store.list(PREFIX).entries:
            flow, _, name = each.key.removeprefix(PREFIX).partition("/")
            found.setdefault(flow, {})[_unquoted(name)] = each.value
    return found


def document_key(flow: str, name: str) -> str:
    """Return the key of a document in the meta store."""
    return f"{PREFIX}{flow}/" + name.replace("%", "@").replace("~", "@7E")  # names of lanes are quoted


class DocumentCopies(Closeable):
    """Keeps a flow's files equal to its documents in the meta store. Does nothing without one. One thread at a time."""

    def __init__(self, settings: Settings, flow: str) -> None:
        """Raises MetaUnavailable, UnsupportedVersion."""
        from millrace.coord.store_factory import open_cluster_store

        self._settings = settings
        self._folder = flow_folder(settings, flow)
        self._flow, self._prefix = flow, f"{PREFIX}{flow}/"
        self._store: MetaStore | None = open_cluster_store(settings, SystemClock()) if settings.meta_store else None
        self._known: dict[str, int] = {}
        """Revisions of what was copied."""

    def refresh(self) -> None:
        """Take over what other machines changed, and where the tables lie by now: no other process may run here.

        Raises MetaUnavailable, MetaAmbiguous, UnsupportedVersion.
        """
        if self._store is None:
            return
        copy_place(self._settings, self._store)
        found = self._listed(self._store)
        mark = self._folder / SHARED_MARK
        if not mark.exists():
            # The files of an earlier build, or of a deployment that had no meta store.
            own = {name: body for name in _files(self._folder) if (body := _read(self._folder / name)) is not None}
            for name in own.keys() - found.keys():
                key = self._key(name)
                self._store.commit([Put(key, own[name])], when=[RevisionEquals(key, 0)])
            found = self._listed(self._store)
            _write(mark, b"", synced=False)
        for name, entry in found.items():
            if self._known.get(name) != entry.modified:
                _write(self._folder / name, entry.value, synced=False)
        for name in set(_files(self._folder)) - found.keys():
            _write(self._folder / name, None, synced=False)
        self._known = {name: each.modified for name, each in found.items()}

    def change(self, name: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Change a document like `change_document`, and its local copy."""
        assert self._store is not None, "there is a meta store"
        key, end = self._key(name), Deadline.after(_CHANGE_SECONDS)
        while True:
            there = self._store.get(key)
            before = None if there is None else there.value
            after = change(before)
            if after == before:
                return
            seen = [RevisionEquals(key, 0 if there is None else there.modified)]
            try:
                written = self._store.commit([Delete(key) if after is None else Put(key, after)], when=seen)
            except MetaAmbiguous:
                found = self._store.get(key)
                written = found.modified if found is not None and found.value == after else None
                if found is None and after is None:
                    written = 0
            if written is not None:
                _write(self._folder / name, after, synced=False)
                self._known[name] = written
                return
            if not end.pause(0.05):
                raise MetaUnavailable(f"others change {key} all the time: try again")

    def forget(self) -> None:
        """Remove all documents."""
        if self._store is not None:
            for each in self._store.list(self._prefix).entries:
                self._store.commit([Delete(each.key)])

    def close(self) -> None:
        """Idempotent."""
        if self._store is not None:
            self._store.close()

    def _listed(self, store: MetaStore) -> dict[str, Entry]:
        return {self._name(each.key): each for each in store.list(self._prefix).entries}

    def _key(self, name: str) -> str:
        return document_key(self._flow, name)

    def _name(self, key: str) -> str:
        return _unquoted(key.removeprefix(self._prefix))


def _unquoted(name: str) -> str:
    return name.replace("@7E", "~").replace("@", "%")


def _files(folder: Path) -> list[str]:
    suspects = (f"{SUSPECTS}/{each.name}" for each in (folder / SUSPECTS).glob("*.json"))
    return [name for name in (WANTED, SKIP, *suspects) if (folder / name).exists()]


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, body: bytes | None, *, synced: bool) -> None:
    if body is None:
        path.unlink(missing_ok=True)
        return
    replace_file(path, body, synced=synced)
