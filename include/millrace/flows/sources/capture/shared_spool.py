"""The copy of a spool that all machines share, so that a capture continues on another one after its machine is lost.

Each transaction of the feeder on its spool is a numbered *record*: the statements that it made, and the facts that it
stored. A record is durable here before the spool on the local disk has it, and so before a lane reads its changes or
the database gets an acknowledgement. So the local spool is always a beginning of the shared one, and another machine
makes it anew from here.

    meta store   capture-spools/<group>           the head: the owner, the last file, and small records after it
    tables       capture-spools/<group>/<n>-<id>  records from `first` to n, after the file that `before` names
    tables       capture-spools/<group>/<n>-<id>.db  the whole spool after n records: the file's chain begins here

The head is changed by compare-and-set alone. Whoever takes over puts its name into it, so that the former owner's next
record is refused (StreamBusy), wherever that was suspended or cut off. What lanes do to a spool (trims, targets) is of
each machine.
"""

from __future__ import annotations

import logging
import re
import secrets
import sqlite3
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import msgspec

from millrace.base.closeable import Closeable
from millrace.base.errors import CaptureLost, MetaAmbiguous, StreamBusy, TablesMoved, UnsupportedVersion
from millrace.base.failpoint import hit
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.flows.hold import SPOOLS_KEY
from millrace.meta.store import Delete, Entry, MetaStore, Put, RevisionEquals
from millrace.storage.store import TableStore, put_stream, store_at

if TYPE_CHECKING:
    from millrace.meta.factory import ClosableMetaStore

VERSION: Final = 1
"""Of the head and of the files."""
FOLDER: Final = "capture-spools"
"""Of the files, below the tables, and of the heads in the meta store."""
SMALL_BYTES: Final = 8 << 10
"""Of records that the head has; larger ones go into a file."""
BASE_BYTES: Final = 8 << 20
"""Of files after the whole spool, after which it is stored whole again, if it is not larger itself."""
BASE_FILES: Final = 256
"""The same as a number of files, for a spool of less than MODERATE_BYTES."""
MODERATE_BYTES: Final = 64 << 20
_TRIES: Final = 5
_NUMBER: Final = re.compile(r"(\d{12})-[0-9a-f]+(\.db)?")
_WRITES: Final = re.compile(r"\s*(insert|update|delete|create|replace)\b", re.IGNORECASE)

_logger: Final = logging.getLogger(__name__)

Statement = tuple[str, list[list[Any]]]
"""SQL, and the values of each run of it."""


class Record(msgspec.Struct, array_like=True):
    """One transaction of the feeder."""

    statements: list[Statement]
    facts: dict[str, str]
    """As JSON."""


class _Part(msgspec.Struct):
    """The content of a file of records."""

    version: int
    before: str
    records: list[Record]


class Head(msgspec.Struct, kw_only=True):
    """What the meta store has of a spool."""

    version: int = VERSION
    chain: str
    """Which shared spool it is: of one that is made anew, another one."""
    owner: str
    place: str
    """The URI of the tables beside which the files lie."""
    last: str = ""
    """The newest file; empty: there is none yet."""
    next: int = 0
    """The number of the next record."""
    small: list[Record] = []
    """The records after those of the file."""
    files: int = 0
    bytes: int = 0
    """Of the files after the whole spool."""


class RecordingConnection:
    """A connection that notes the statements that write. `execute` and `executemany` are those of sqlite3."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.statements: list[Statement] = []

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        if _WRITES.match(statement):
            self.statements.append((statement, [list(values)]))
        return self.connection.execute(statement, values)

    def executemany(self, statement: str, values: Iterable[Sequence[Any]]) -> sqlite3.Cursor:
        rows = [list(each) for each in values]
        if rows:
            self.statements.append((statement, rows))
        return self.connection.executemany(statement, rows)


class SharedSpool(Closeable):
    """One owner's hand on a shared spool. One thread at a time."""

    def __init__(self, meta: ClosableMetaStore, files: TableStore, group: str, *, place: str) -> None:
        """`files` is the folder of the files; `place` the tables' URI. Closes `meta` in the end."""
        self._meta, self._files, self._group, self._place = meta, files, group, place
        self._key = _key(group)
        self._owner = uuid.uuid4().hex
        self._head = Head(chain="", owner="", place="")
        self._revision = 0

    @property
    def chain(self) -> str:
        return self._head.chain

    @property
    def next(self) -> int:
        """The number of the next record."""
        return self._head.next

    @property
    def is_new(self) -> bool:
        """Whether it has nothing yet: what the first owner's machine has is its beginning."""
        return not self._head.next and not self._head.last

    def take_over(self) -> None:
        """Become its owner; the former one writes nothing from here on.

        Raises MetaUnavailable; StreamBusy if others take it over at the same time; TablesMoved.
        """
        for _ in range(_TRIES):
            entry = self._meta.get(self._key)
            if entry is None:
                head = Head(chain=secrets.token_hex(8), owner=self._owner, place=self._place)
            else:
                head = _decoded(entry.value, self._group)
                if head.place != self._place:
                    raise TablesMoved(
                        f"the spool of {self._group} lies beside the tables at {head.place}, not {self._place}: start"
                        " the worker again when the tables have moved"
                    )
                head.owner = self._owner
            if self._commit(head, 0 if entry is None else entry.modified):
                return
        raise self._busy()

    def read(self) -> bool:
        """Read it without becoming its owner; nothing may be put then. Returns False if there is none."""
        entry = self._meta.get(self._key)
        if entry is not None:
            self._head = _decoded(entry.value, self._group)
        return entry is not None

    def look(self) -> None:
        """Read the head again, after a record whose outcome is not known. Raises StreamBusy, MetaUnavailable."""
        entry = self._meta.get(self._key)
        head = None if entry is None else _decoded(entry.value, self._group)
        if entry is None or head is None or head.owner != self._owner:
            raise self._busy()
        self._head, self._revision = head, entry.modified

    def put(self, record: Record) -> None:
        """Store the next record, durably. After an error, `look` tells whether it is there.

        Raises StreamBusy if another machine has taken over, MetaUnavailable, MetaAmbiguous, OSError.
        """
        head = msgspec.structs.replace(self._head, next=self._head.next + 1, small=[*self._head.small, record])
        if len(msgspec.msgpack.encode(head.small)) > SMALL_BYTES:
            body = msgspec.msgpack.encode(_Part(VERSION, head.last, head.small))
            head = msgspec.structs.replace(
                head, last=self._store(head.next, body), small=[], files=head.files + 1, bytes=head.bytes + len(body)
            )
            hit("capture.shared_file")
        if not self._commit(head, self._revision):
            self.look()  # raises, unless it was this one's own earlier try
            raise MetaAmbiguous(f"a record of the spool of {self._group} was stored when its answer had been lost")
        hit("capture.shared")

    def is_due(self, spool_bytes: int) -> bool:
        """Return whether the whole spool, of `spool_bytes`, should be stored in place of the files."""
        head = self._head
        many = head.files >= BASE_FILES and spool_bytes < MODERATE_BYTES
        return many or head.bytes >= max(BASE_BYTES, spool_bytes)

    def put_whole(self, spool: Path) -> bool:
        """Store the file of a whole spool, which has all records, in place of the files. Raises as `put`.

        Returns False, and stores nothing, while a backup reads the files.
        """
        if self._held():
            return False
        before = self._head.last
        name = f"{self._head.next:012d}-{secrets.token_hex(8)}.db"
        with spool.open("rb") as source:
            put_stream(self._files, name, source)
        # Before the commit: what another owner stores afterwards is its own.
        old = [each for each in self._files.list("") if _NUMBER.fullmatch(each) and each != name]
        head = msgspec.structs.replace(self._head, last=name, small=[], files=0, bytes=0)
        if not self._commit(head, self._revision, RevisionEquals(SPOOLS_KEY, 0)):
            self.look()
            if self._held():
                self._files.delete([name])
                return False
            raise MetaAmbiguous(f"the spool of {self._group} was stored when an earlier answer had been lost")
        with suppress(OSError):  # the next one removes them
            self._files.delete(old)
        _logger.info("%s: the spool is stored whole as %s, after %s", self._group, name, before or "its beginning")
        return True

    def _held(self) -> bool:
        return self._meta.get(SPOOLS_KEY) is not None

    def base(self) -> str:
        """Return the name of the newest whole spool; empty: there is none."""
        return next((name for name, _ in self._chain() if name.endswith(".db")), "")

    def download(self, name: str, path: Path) -> None:
        """Write the file of a whole spool to `path`. Raises CaptureLost, OSError."""
        with self._files.filesystem.open_input_stream(name) as source, path.open("wb") as target:
            while block := source.read(4 << 20):
                target.write(block)

    def records(self, first: int) -> Iterable[Record]:
        """Yield the records from number `first` on. The newest whole spool must not be later. Raises CaptureLost."""
        number, names = self._head.next - len(self._head.small), list[str]()
        for name, part in self._chain():
            if number <= first or name.endswith(".db"):
                break
            assert part is not None
            names.append(name)
            number -= len(part.records)
        if number > first:
            raise self._lost(f"its records from {first} on are not there")
        # Each file names the one before it, so they are found from the newest on, and read once more in their order: a
        # large spool does not fit into memory.
        for name in reversed(names):
            for record in self._part(name).records:
                if number >= first:
                    yield record
                number += 1
        for record in self._head.small:
            if number >= first:
                yield record
            number += 1

    def _chain(self) -> Iterable[tuple[str, _Part | None]]:
        """Yield the files, the newest first, up to the whole spool."""
        name = self._head.last
        while name:
            if name.endswith(".db"):
                yield name, None
                return
            part = self._part(name)
            yield name, part
            name = part.before

    def _part(self, name: str) -> _Part:
        body = self._files.read(name)
        if body is None:
            raise self._lost(f"its file {name} does not exist")
        return msgspec.msgpack.decode(body, type=_Part)

    def _store(self, number: int, body: bytes) -> str:
        name = f"{number:012d}-{secrets.token_hex(8)}"
        sink = self._files.put(name)
        try:
            sink.write(body)
            sink.sync()
        finally:
            sink.close()
        return name

    def _commit(self, head: Head, revision: int, *when: RevisionEquals) -> bool:
        written = self._meta.commit(
            [Put(self._key, msgspec.msgpack.encode(head))], when=[RevisionEquals(self._key, revision), *when]
        )
        if written is None:
            return False
        self._head, self._revision = head, written
        return True

    def _busy(self) -> StreamBusy:
        return StreamBusy(f"another machine has taken over the capture of {self._group}: stop it first")

    def _lost(self, words: str) -> CaptureLost:
        flow = self._group.removeprefix("millrace-")
        return CaptureLost(
            f"the spool of {self._group} cannot be made anew from {self._files.uri}: {words}. Run `millrace flows"
            f" release {flow}`, and capture the tables by a flow of another id into new collections"
        )

    def close(self) -> None:
        """Idempotent."""
        self._meta.close()


def shared_spool(settings: Settings, group: str) -> SharedSpool | None:
    """Return the shared spool of a flow with this consumer group; None without a meta store.

    Raises MetaUnavailable, UnsupportedVersion.
    """
    if not settings.meta_store:
        return None
    from millrace.coord.store_factory import open_cluster_store

    files = store_at(settings.table_uri(f"{FOLDER}/{group}"))
    meta = open_cluster_store(settings, SystemClock())
    return SharedSpool(meta, files, group, place=settings.tables_uri)


def forget_spool(settings: Settings, group: str) -> None:
    """Remove the shared spool of a flow that ends. Raises MetaUnavailable, MetaAmbiguous, OSError."""
    from millrace.coord.store_factory import open_cluster_store

    if settings.meta_store:
        with open_cluster_store(settings, SystemClock()) as meta:
            meta.commit([Delete(_key(group))])
        files = store_at(settings.table_uri(f"{FOLDER}/{group}"))
        files.delete(each for each in files.list("") if _NUMBER.fullmatch(each))


def shared_groups(settings: Settings) -> list[str]:
    """Return the consumer groups of the flows that have a shared spool. Raises MetaUnavailable."""
    if not settings.meta_store:
        return []
    from millrace.coord.store_factory import open_cluster_store

    with open_cluster_store(settings, SystemClock()) as meta:
        return [_group(each.key) for each in meta.list(f"{FOLDER}/").entries]


def move_spools(meta: MetaStore, place: str, to: str) -> list[str]:
    """Take the shared spools beside the tables at `place` from their owners; return the groups.

    Whoever takes one over from here on has to find the tables at `to`. Raises MetaUnavailable, MetaAmbiguous.
    """
    groups = []
    for listed in meta.list(f"{FOLDER}/").entries:
        entry: Entry | None = listed
        group = _group(listed.key)
        while entry is not None:
            head = _decoded(entry.value, group)
            if head.place not in (place, to):
                break
            head.place, head.owner = to, ""
            seen = RevisionEquals(entry.key, entry.modified)
            if meta.commit([Put(entry.key, msgspec.msgpack.encode(head))], when=[seen]):
                groups.append(group)
                break
            entry = meta.get(entry.key)
    return groups


def _decoded(value: bytes, group: str) -> Head:
    head = msgspec.msgpack.decode(value, type=Head)
    if head.version > VERSION:
        raise UnsupportedVersion(
            f"the shared spool of {group} has version {head.version}; this build supports {VERSION}"
        )
    return head


def _key(group: str) -> str:
    return f"{FOLDER}/{quote(group, safe='').replace('%', '@').replace('~', '@7E')}"


def _group(key: str) -> str:
    return unquote(key.removeprefix(f"{FOLDER}/").replace("@", "%"))
