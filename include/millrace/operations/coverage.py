"""The coverage of an operation: tables that it need not open again, because nothing changed since its last run.

    covered = Coverage.load(settings, "checkpoint", depends={"format": 1})
    for name, uri in covered.changed(tables):      # looks at a folder for each table, and opens none
        table = open_table(uri)
        ...
        covered.record(name)                       # after the work is done
    covered.save()

A table is known by its mark (millrace.storage.table.change_mark), taken before the operation opens it. A commit
meanwhile, also one of the operation itself, leaves another mark, so the next run looks again. A record ends after a day
in any case, and earlier where a decision also follows from time: the operation says until when it holds.

The records are hints in ``run/covered/<operation>.json``. Without the file, or if what the work depends on (settings,
parameters, a format) has changed, everything is done again. No backup contains them, and no copy of a data folder
fits them: a mark holds the folder's number.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.storage.table import ChangeMark, change_mark

FOLDER: Final = "covered"
MAX_SECONDS: Final = 86_400.0
"""Time after which a record ends anyway: some mounts of object stores never move a folder's time."""
ABSENT: Final = ChangeMark("absent", settled=True, at=0.0)
"""Mark of a table that does not exist: a collection without deletes has none."""


class Record(NamedTuple):
    """A table as an operation left it."""

    mark: str
    until: float
    """The record holds before this moment, in Unix seconds."""
    note: Any
    """The operation's note about the table, as JSON, so that it need not open it."""


class Coverage:
    """The records of one operation. Not thread-safe; of two processes that save, the later one's records count."""

    def __init__(self, path: Path, depends: str, records: dict[str, Record], *, ignore: bool) -> None:
        self._path = path
        self._ignore = ignore
        self._depends = depends
        self._records = records
        self._marks: dict[str, ChangeMark] = {}
        self._now = time.time()
        self._dirty = False
        self.tables = 0
        """Number of tables that were looked at."""
        self.unchanged = 0
        """Number of those that need no work."""

    @classmethod
    def load(cls, settings: Settings, operation: str, *, depends: Any = None, ignore: bool = False) -> Self:
        """Read the records of `operation`. `depends` is JSON: records made with another value are void.

        `ignore` makes every table count as changed; the notes of earlier records are void, too.
        """
        path = settings.run_path / FOLDER / f"{operation}.json"
        digest = _digest(depends)
        return cls(path, digest, _read(path, digest), ignore=ignore)

    def look(self, name: str, uri: str) -> Record | None:
        """Return the record of a table that has not changed since, or None. Takes its mark; call it once a run."""
        mark = self._marks[name] = change_mark(uri) or ABSENT
        self.tables += 1
        found = self._records.get(name)
        if self._ignore or found is None or found.mark != mark.text:
            return None
        if self._now >= found.until:
            return None
        self.unchanged += 1
        return found

    def changed(self, tables: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return (name, URI) of the tables that need work. Forgets the records of tables that are not among them."""
        self.retain(tables)
        return [(name, uri) for name, uri in tables.items() if self.look(name, uri) is None]

    def retain(self, names: Collection[str]) -> None:
        """Forget the records of all tables but `names`: the others no longer exist."""
        for name in self._records.keys() - set(names):
            del self._records[name]
            self._dirty = True

    def changed_at(self, name: str) -> float:
        """Return when a table last changed, in Unix seconds, as :meth:`look` found it."""
        return self._marks[name].at

    def note(self, name: str) -> Any:
        """Return the note of a table's last record, also if the table changed since; None without one."""
        found = None if self._ignore else self._records.get(name)
        return None if found is None else found.note

    def record(self, name: str, *, until: float | None = None, note: Any = None) -> None:
        """Record that the work on a table is done, as of the mark that :meth:`look` took.

        A table that changed just before the run is not recorded as unchanged: a commit right after it may have the same
        timestamp. Its note is kept.
        """
        mark = self._marks[name]
        ends = self._now + MAX_SECONDS
        found = Record(mark.text if mark.settled else "", ends if until is None else min(until, ends), note)
        self._dirty = self._dirty or self._records.get(name) != found
        self._records[name] = found

    def save(self, *, depends: Any = None) -> None:
        """Write the records if one of them has changed. `depends`: what they depend on from now on, if that changed."""
        if depends is not None:
            self._dirty = self._dirty or self._depends != _digest(depends)
            self._depends = _digest(depends)
        if self._dirty:
            tables = {name: list(each) for name, each in self._records.items()}
            replace_json(self._path, {"depends": self._depends, "tables": tables})
            self._dirty = False


def _digest(depends: Any) -> str:
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(path: Path, depends: str) -> dict[str, Record]:
    try:
        value = json.loads(path.read_text())
        records = {name: Record(mark, float(until), note) for name, (mark, until, note) in value["tables"].items()}
        return records if value["depends"] == depends else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
