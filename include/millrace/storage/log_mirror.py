"""The log of a table on an object store, as files of this machine, for one handle.

delta-rs reads each entry of a log twice when it opens a table, and again for each question about app transactions. So
it gets a folder with just the entries that it needs, and asks the store for nothing. Entries come from a cache that all
processes of this user share (:class:`ObjectCache`); what it lacks is one request each. Opening a table is one listing,
looking for news is one request, and a commit is the conditional put of the entry that delta-rs wrote into the folder.

News of commits travel by a file that each process of this machine replaces after a commit (:func:`announce`), and to
other machines of a cluster by the meta store (millrace.coord.machine.table_news). A poller
(:meth:`LogMirror.has_news`) asks the store only if such a file changed, or after a pause that grows with the time since
the last news: so it finds commits of machines that are not heard. The pollers of a machine share these looks: one of
them asks, and notes the version that it found. The pause is at most IDLE_SECONDS, or HEARD_SECONDS while the news of
other machines reach this one.

A log on an object store keeps each entry for the store's ``log_seconds``. So a version that was the newest a moment ago
is still in the log, and its successor, if there is one, too: that is checked by a request only after SEEN_SECONDS.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import math
import os
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeGuard

from millrace.base.process import boot_id
from millrace.base.scratch_folder import ScratchFolder
from millrace.storage.delta_log import (
    LAST_CHECKPOINT_FILE,
    LOG_FOLDER,
    boot_seconds,
    checkpoint_file,
    commit_file,
    is_checkpoint,
    version_of,
)
from millrace.storage.local import LocalStore
from millrace.storage.store import ConditionalStore, TableStore, s3_server

if TYPE_CHECKING:
    from deltalake import DeltaTable

SEEN_SECONDS: Final = 600.0
"""Time for which a version that was the newest is assumed to be still in the log: far less than an entry stays."""
CACHE_BYTES: Final = 256 << 20
"""Bound of the cache on disk. It is checked every CHECK_EVERY new files, so it may be exceeded by as many."""
CHECK_EVERY: Final = 256
IDLE_SECONDS: Final = 60.0
"""Longest time between two looks of a machine's pollers at a table."""
HEARD_SECONDS: Final = 300.0
"""The same while the news of other machines reach this one."""
HEARD_FRESH: Final = 15.0
"""Time after which the carrier of news (:func:`note_heard`) counts as gone."""
SHARED_AFTER: Final = 5.0
"""A look is noted for others if the poller's last one was so long ago: not those of commits under load."""
QUIET_SHARE: Final = 0.1
"""A poller's pause as a share of the time since the last news."""

NEWS_FILES: Final = 10_000
"""Bound of the files of news of each kind, one for each table. It is checked every CHECK_EVERY news of a process."""

_NEWS: Final = "news"
_REMOTE_NEWS: Final = "news-of-others"
_ALL_NEWS: Final = "news-of-all"
_LOOKED: Final = "looks"
_HEARD: Final = "heard"
_TOKEN_BYTES: Final = 16
_TICK_NS: Final = 100_000_000
_news_guard = threading.Lock()
_writes: Final[dict[str, itertools.count[int]]] = {}
"""Files that this process wrote, by kind."""
_DEPTH: Final = 4
"""Levels of folders between a table and the root of its deployment's tables, at most."""
_FEW: Final = 16
"""Commits that are fetched one by one; for more, the log is listed."""
_LOOKS: Final = 3
_THREADS: Final = 8
_USED_SECONDS: Final = 3600.0
"""Age from which on a file of the cache that is used counts as new again."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """A file of a log, as a listing has it."""

    name: str
    """Without its folder."""
    tag: str
    """Changes with the content (ETag). Empty: the store does not say."""


class MirroredStore(ConditionalStore, Protocol):
    """A store whose logs are read by :class:`LogMirror`. Its ``put`` replaces a file, as that of an object does."""

    def list_log(self, after: str) -> Sequence[ListedObject]:
        """Return the files of the table's log whose names sort after `after`."""
        ...

    def read_tagged(self, name: str) -> tuple[bytes, str] | None:
        """Return the bytes of a file and its tag; None if it does not exist."""
        ...

    def put_new(self, name: str, data: bytes) -> str | None:
        """Create a file as ``put_if_absent`` does, and return its tag; None if the name is taken."""
        ...


def is_mirrored(store: TableStore) -> TypeGuard[MirroredStore]:
    """Return whether the store is one whose logs are mirrored."""
    return callable(getattr(store, "list_log", None))


def mirror_of(store: TableStore) -> LogMirror | None:
    """Return a mirror of the log of a table; None if its store has no such mirrors."""
    return LogMirror(store) if is_mirrored(store) else None


class LogMirror:
    """The entries of one table's log that one handle has seen. Not thread-safe."""

    def __init__(self, store: MirroredStore) -> None:
        self._store = store
        self._cache = ObjectCache(store.uri)
        self._folder = _Folder()
        self._newest_at: float | None = None
        self._token = b""
        self._looked_at = self._news_at = -math.inf
        self.base = 0
        """Version of the checkpoint that the table was opened from; 0: none."""

    @property
    def log(self) -> TableStore:
        """The mirrored entries, to be read as the table's log."""
        return LocalStore(self._folder.path)

    def load(self, version: int | None = None) -> DeltaTable:
        """Open the table at its newest version, or at `version`, by one listing and a request for each unknown entry.

        Raises TableNotFoundError, DeltaError, OSError.
        """
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        for _ in range(_LOOKS):
            begun, token = boot_seconds(), announced(self._store.uri)
            self._cache.look()
            found = self._needed(version)
            if not found:
                raise TableNotFoundError(f"no log at {self._store.uri}")
            folder = _Folder()
            if _has_gaps(found) or not self._fill(folder, found):
                continue  # entries were trimmed meanwhile
            delta = DeltaTable(str(folder.path), version=version)
            self._folder, self._newest_at = folder, begun if version is None else None
            self.base = max((version_of(each.name) for each in found if is_checkpoint(each.name)), default=0)
            self._token, self._looked_at, self._news_at = token, begun, begun
            return delta
        raise DeltaError(f"the log of {self._store.uri} has gaps")

    def reload(self, version: int) -> DeltaTable:
        """Open the table at `version` again, from the mirrored entries alone."""
        from deltalake import DeltaTable

        return DeltaTable(str(self._folder.path), version=version)

    def pull(self, version: int) -> int | None:
        """Fetch the entries after `version`. Returns the newest version; None if the table must be loaded again.

        It must if there are many, or if the log no longer has `version`.
        """
        begun, newest, token = boot_seconds(), version, announced(self._store.uri)
        unasked, shared = token == self._token, begun - self._looked_at >= SHARED_AFTER
        while (found := self._store.read_tagged(commit_file(newest + 1))) is not None:
            if newest == version + _FEW:
                return None
            newest += 1
            self._folder.write(commit_file(newest), found[0])
            self._cache.add(commit_file(newest).rpartition("/")[2], found[1], found[0])
        if newest == version and not self.seen_newest() and self._store.size(commit_file(version)) is None:
            return None
        self._newest_at = self._looked_at = begun
        self._token = token
        if shared:
            _note_look(self._store.uri, newest, begun)
        if newest != version:
            self._news_at = begun
            if unasked and shared:
                remote_news(self._store.uri)  # nobody announced it to the other pollers of this machine
        return newest

    def has_news(self, version: int) -> bool:
        """Return whether a look at the store is worth its request: the question of a poller that has `version`."""
        if announced(self._store.uri) != self._token:
            return True
        now = boot_seconds()
        pause = QUIET_SHARE * (now - self._news_at)
        if now - self._looked_at < min(IDLE_SECONDS, pause):
            return False
        found, at = _look_of(self._store.uri)
        if found == version and self._looked_at < at <= now:  # another process of this machine asked
            self._newest_at = self._looked_at = at
        limit = HEARD_SECONDS if pause > IDLE_SECONDS and _hears(self._store.uri, now) else IDLE_SECONDS
        return now - self._looked_at >= min(limit, pause)

    def seen_newest(self) -> bool:
        """Return whether the version was the newest so recently that the log still has it and its successors."""
        return self._newest_at is not None and boot_seconds() - self._newest_at < SEEN_SECONDS

    def push(self, version: int) -> bool:
        """Commit the entry that delta-rs wrote into the folder. Returns False if the version is taken.

        Raises OSError if it may or may not be committed. Unless it returns True, the entry is gone from the folder.
        """
        path, begun = self._folder.path / commit_file(version), boot_seconds()
        tag: str | None = None
        try:
            data = path.read_bytes()
            tag = self._store.put_new(commit_file(version), data)
        finally:
            if tag is None:
                path.unlink(missing_ok=True)
        if tag is not None:
            self._cache.add(path.name, tag, data)
        self._newest_at = None if tag is None else begun
        return tag is not None

    def push_checkpoint(self, version: int) -> None:
        """Upload the checkpoint that delta-rs wrote into the folder, and then the hint at it."""
        for name in (checkpoint_file(version), LAST_CHECKPOINT_FILE):
            sink = self._store.put(name)
            try:
                sink.write((self._folder.path / name).read_bytes())
                sink.sync()
            finally:
                sink.close()

    def _needed(self, version: int | None) -> Sequence[ListedObject]:
        """Return the newest checkpoint (up to `version`), and the commits from it on."""
        known = self._cache.newest_checkpoint() if version is None else None
        if known is not None:
            listed = self._store.list_log(f"{LOG_FOLDER}/{known:020d}")
            if any(is_checkpoint(each.name) for each in listed):
                return _from_checkpoint(listed, None)
        return _from_checkpoint(self._store.list_log(""), version)

    def _fill(self, folder: _Folder, wanted: Sequence[ListedObject]) -> bool:
        """Put the listed files into the folder. Returns False if one is gone."""
        missing = [each for each in wanted if not self._cache.link(each, folder.path / LOG_FOLDER / each.name)]
        if not missing:
            return True
        with ThreadPoolExecutor(min(_THREADS, len(missing)), thread_name_prefix="log-mirror") as pool:
            return all(pool.map(partial(self._fetch, folder), missing))

    def _fetch(self, folder: _Folder, wanted: ListedObject) -> bool:
        found = self._store.read_tagged(f"{LOG_FOLDER}/{wanted.name}")
        if found is None:
            return False
        data, tag = found
        folder.write(f"{LOG_FOLDER}/{wanted.name}", data)
        self._cache.add(wanted.name, tag, data)
        return True


def _from_checkpoint(listed: Sequence[ListedObject], version: int | None) -> list[ListedObject]:
    files = [
        each for each in listed if each.name[:20].isdecimal() and (is_checkpoint(each.name) or _is_commit(each.name))
    ]
    files = [each for each in files if version is None or version_of(each.name) <= version]
    base = max((each.name for each in files if is_checkpoint(each.name)), default="")
    start = version_of(base) if base else 0
    return [each for each in files if each.name == base or (_is_commit(each.name) and version_of(each.name) >= start)]


def _is_commit(name: str) -> bool:
    return name.endswith(".json") and len(name) == 25 and name[:20].isdecimal()


def _has_gaps(found: Sequence[ListedObject]) -> bool:
    """Return whether commits after the checkpoint are missing, or those from the first one on if there is none."""
    base = max((version_of(each.name) for each in found if is_checkpoint(each.name)), default=-1)
    after = sorted(version_of(each.name) for each in found if _is_commit(each.name) and version_of(each.name) > base)
    return after != list(range(base + 1, base + 1 + len(after)))


def announce(uri: str) -> None:
    """Tell the processes of this machine of a new version of the table, and others by millrace.coord.machine."""
    _tell(cache_folder() / _NEWS, uri)


def remote_news(uri: str, folder: Path | None = None) -> None:
    """Tell the processes of this machine that another one announced a version of the table at `uri`.

    `folder`: the machine's cache, if not this user's.
    """
    _tell((folder or cache_folder()) / _REMOTE_NEWS, uri)


def announced(uri: str) -> bytes:
    """Return a text that differs after each :func:`announce`, here or on another machine that is heard."""
    folder, name = cache_folder(), news_key(uri)
    return b"".join(_text(folder / each / name)[:_TOKEN_BYTES] for each in (_NEWS, _REMOTE_NEWS)) + _text(
        folder / _ALL_NEWS
    )


def note_heard(root: str, folder: Path | None = None) -> None:
    """Note that this machine hears, until now, of all commits that other machines announced below `root`."""
    _write((folder or cache_folder()) / _HEARD, root, str(boot_seconds()).encode())


def _hears(uri: str, now: float) -> bool:
    """Return whether a carrier of news for the table's deployment is at work on this machine."""
    folder, root = cache_folder() / _HEARD, uri
    for _ in range(_DEPTH):
        root = root.rpartition("/")[0]
        with suppress(ValueError):
            if 0 <= now - float(_text(folder / news_key(root))) < HEARD_FRESH:
                return True
    return False


def _note_look(uri: str, version: int, at: float) -> None:
    """Tell the other pollers of this machine that `version` was the newest at `at`, by :func:`boot_seconds`."""
    _write(cache_folder() / _LOOKED, uri, f"{version} {at} {boot_id()}".encode())


def _look_of(uri: str) -> tuple[int, float]:
    """Return the newest version that a poller of this machine found at last, and when; -1 if there was none."""
    words = _text(cache_folder() / _LOOKED / news_key(uri)).decode(errors="replace").split()
    try:
        version, at, boot = int(words[0]), float(words[1]), words[2]
    except (ValueError, IndexError):
        return -1, -math.inf
    # The clock begins anew with each boot, and machines may share a cache folder.
    return (version, at) if boot == boot_id() else (-1, -math.inf)


def _tell(folder: Path, uri: str) -> None:
    _write(folder, uri, uuid.uuid4().bytes + uri.encode())


def _write(folder: Path, uri: str, text: bytes) -> None:
    """Replace the table's file in `folder`, whose number of files is bounded."""
    draft = folder / f".{uuid.uuid4().hex}"
    with suppress(OSError):  # pollers then find it by looking
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(text)
        draft.replace(folder / news_key(uri))
    with _news_guard:
        due = next(_writes.setdefault(folder.name, itertools.count())) % CHECK_EVERY == 0
    if due:
        _bound(folder)


def _bound(folder: Path) -> None:
    """Remove the oldest news. A poller of such a table then looks once for nothing."""
    found: list[tuple[float, str]] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                if entry.is_file() and not entry.name.endswith(".lock"):
                    found.append((entry.stat().st_mtime, entry.path))
    if len(found) > NEWS_FILES:
        for _, path in sorted(found)[: len(found) - NEWS_FILES * 3 // 4]:
            with suppress(OSError):
                Path(path).unlink()


def _text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


class LocalNews:
    """The announcements of this machine's processes. Not thread-safe."""

    def __init__(self, cache: Path | None = None) -> None:
        """`cache`: the folder of the cache, if not this user's."""
        self._cache = cache or cache_folder()
        self.folder = self._cache / _NEWS
        self._marks: dict[str, int] = {}
        self._looked = -1

    def changed(self) -> list[str]:
        """Return the URIs of the tables that were announced since the last call. Without news, costs one stat."""
        try:
            mark = self.folder.stat().st_mtime_ns
            # A file that is named in the same tick of the clock leaves the folder's time as it is.
            if mark == self._looked and time.time_ns() - mark > _TICK_NS:
                return []
            entries = [(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(self.folder) if entry.is_file()]
        except OSError:
            return []  # a file was replaced meanwhile: the next call sees it
        self._looked = mark
        named = {name: at for name, at in entries if not name.startswith(".")}
        texts = {name: _text(self.folder / name) for name, at in named.items() if self._marks.get(name) != at}
        self._marks = named
        return [text[_TOKEN_BYTES:].decode() for text in texts.values() if len(text) > _TOKEN_BYTES]

    def announce_all(self) -> None:
        """Tell the processes of this machine that every table may have a new version."""
        draft = self._cache / f".{uuid.uuid4().hex}"
        with suppress(OSError):
            draft.write_bytes(uuid.uuid4().bytes)
            draft.replace(self._cache / _ALL_NEWS)


def news_key(uri: str) -> str:
    """Return a file name for a table or a root of tables: two servers may have a bucket of one name.

    Processes of different versions on one machine share these files, so the text must not change.
    """
    return hashlib.sha256(f"{s3_server() or None} {uri}".encode()).hexdigest()[:32]


class ObjectCache:
    """Files of one table's log that never change, on this disk. Safe for use by several processes.

    A file's name has its tag, so that a table made anew at the same place gets none of another's entries, and a digest
    of its content: nothing is synced, and after a power loss a file that does not have its digest is fetched again.
    """

    _added = 0
    _guard = threading.Lock()

    def __init__(self, uri: str) -> None:
        self._folder = cache_folder() / "logs" / news_key(uri)
        self._names: list[str] = []

    def look(self) -> None:
        """See which files there are now."""
        try:
            self._names = os.listdir(self._folder)
        except OSError:
            self._names = []

    def newest_checkpoint(self) -> int | None:
        """Return the version of the newest checkpoint in the cache."""
        found = (name.partition("~")[0] for name in self._names)
        return max((version_of(name) for name in found if is_checkpoint(name)), default=None)

    def link(self, wanted: ListedObject, target: Path) -> bool:
        """Link the file to `target`. Returns False if the cache lacks it."""
        if not wanted.tag:
            return False
        start = _plain(f"{wanted.name}~{wanted.tag}~")
        for name in self._names:
            if not name.startswith(start):
                continue
            path = self._folder / name
            try:
                data = path.read_bytes()
                if _digest(data) != name.rpartition("~")[2]:
                    path.unlink(missing_ok=True)
                    continue
                if path.stat().st_mtime < time.time() - _USED_SECONDS:
                    os.utime(path)
                target.write_bytes(data)
            except OSError:
                continue  # another process removed it
            return True
        return False

    def add(self, name: str, tag: str, data: bytes) -> None:
        """Keep a file. A failure (no room, no right) leaves it out."""
        if not tag:
            return
        draft = self._folder / f".{uuid.uuid4().hex}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(data)
            draft.replace(self._folder / _plain(f"{name}~{tag}~{_digest(data)}"))
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            return
        with ObjectCache._guard:
            ObjectCache._added += 1
            due = ObjectCache._added % CHECK_EVERY == 1
        if due:
            shrink(self._folder.parent, CACHE_BYTES)


def shrink(folder: Path, limit: int) -> None:
    """Remove the files that were used longest ago until the folders in `folder` have three quarters of `limit` bytes.

    Does nothing if they have less than `limit`.
    """
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob("*/*"):
        with suppress(OSError):
            seen = path.stat()
            found.append((seen.st_mtime, seen.st_size, path))
    total = sum(size for _, size, _ in found)
    if total <= limit:
        return
    for _, size, path in sorted(found):
        if total <= limit * 3 // 4:
            break
        with suppress(OSError):
            path.unlink()
        total -= size
    for each in folder.iterdir():
        with suppress(OSError):
            each.rmdir()  # unless it has files


def cache_folder() -> Path:
    """Return the folder of this user's caches, as the setting cache_dir names it in the environment."""
    named = os.environ.get("MILLRACE_CACHE")
    if named:
        return Path(named) / "objects"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "millrace" / "objects"


def _plain(name: str) -> str:
    return name.replace('"', "").replace("/", "_")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class _Folder:
    """A folder below the process's scratch folder. It is removed with its last reference."""

    def __init__(self) -> None:
        self.path = _scratch() / uuid.uuid4().hex
        (self.path / LOG_FOLDER).mkdir(parents=True)
        weakref.finalize(self, _removed, self.path, os.getpid())

    def write(self, name: str, data: bytes) -> None:
        """Create a file, as a whole: delta-rs may look while it is written."""
        draft = self.path / f".{uuid.uuid4().hex}"
        draft.write_bytes(data)
        draft.replace(self.path / name)


def _removed(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked process has the objects of its parent
        shutil.rmtree(path, ignore_errors=True)


_made: dict[int, ScratchFolder] = {}
_making = threading.Lock()


def _scratch() -> Path:
    """Return the folder of this process, which ends with it; the next process removes that of a killed one."""
    pid = os.getpid()
    with _making:
        if pid not in _made:
            made = ScratchFolder(cache_folder() / "open" / uuid.uuid4().hex, pattern="[0-9a-f]{32}")
            _made[pid] = made
            atexit.register(_discarded, made, pid)
        return _made[pid].path


def _discarded(made: ScratchFolder, pid: int) -> None:
    if os.getpid() == pid:
        made.discard()
