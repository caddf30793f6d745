"""Definitions of collections by name, as a client caches them: an append by name makes no request.

How old a cached definition may be:

- A schema change, a new or dropped partition and a dropped or new collection count at once if they were made through
  the same catalog (:meth:`DefinitionCache.changing`). So does an alias that points elsewhere.
- Others' changes count MAX_AGE seconds later at most. A name in use is asked for again in the background, so that
  its users do not wait.
- A user of the cache asks the catalog sooner (:meth:`DefinitionCache.renew`) if rows do not fit the definition or the
  chain rejects them by it.

The chain judges every message by its own state, so an older definition bypasses no check, no partition and no drop.
Within MAX_AGE, rows may lack another client's change of a default, and may use a field's name from before another
client renamed or dropped it, as those of any producer that knows an older schema (docs/schema-evolution.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from millrace.base.errors import CollectionNotFound
from millrace.catalog.collection import CollectionInfo

_log: Final = logging.getLogger(__name__)

MAX_NAMES: Final = 10_000
"""Names that are cached; beyond that, the least recently used one is forgotten."""
MAX_AGE: Final = 2.0
"""Seconds for which a definition is used after the catalog was asked for it. In use, it is asked for after half."""


@dataclass(slots=True, eq=False)
class _Lookup:
    """A request that is under way. Only the newest one of a name is cached."""

    began: float
    changes: int
    """Number of changes that had been announced to the cache by then."""
    answer: Future[CollectionInfo] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Cached:
    definition: CollectionInfo
    asked: float


class DefinitionCache:
    """The definitions that `fetch` returns by name, for a short while. Thread-safe."""

    def __init__(
        self,
        fetch: Callable[[str], CollectionInfo],
        *,
        max_names: int = MAX_NAMES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fetch` asks the catalog; it raises CollectionNotFound for a name that no collection has."""
        self._fetch = fetch
        self._max_names = max_names
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, _Cached] = OrderedDict()
        self._lookups: dict[str, _Lookup] = {}
        self._aliases: dict[str, set[str]] = {}
        """For each collection's name, the other names under which its definition is cached."""
        self._changes = 0
        self._due: OrderedDict[str, None] = OrderedDict()
        self._refreshing = False

    def cached(self, name: str) -> CollectionInfo | None:
        """Return the definition, or None if the catalog must be asked (:meth:`get`). Never waits for a request."""
        now = self._clock()
        with self._lock:
            found = self._cached.get(name)
            if found is None or now - found.asked > self._max_age:
                return None
            self._cached.move_to_end(name)
            if now - found.asked > self._max_age / 2 and name not in self._lookups:
                self._refresh_soon(name)
            return found.definition

    def get(self, name: str) -> CollectionInfo:
        """Return the definition; ask the catalog if it is not cached. Callers that wait for one name share a request.

        Raises what the catalog raises.
        """
        definition = self.cached(name)
        if definition is not None:
            return definition
        with self._lock:
            shared = self._lookups.get(name)
            if shared is None or self._clock() - shared.began > self._max_age:
                shared, own = None, self._begin(name)
        if shared is None:
            return self._ask(name, own)
        try:
            return shared.answer.result()
        except CancelledError:  # the thread that asked was interrupted
            return self.renew(name)
        except Exception as error:
            raise copy(error) from None

    def renew(self, name: str) -> CollectionInfo:
        """Ask the catalog now, and return its definition. Raises what the catalog raises."""
        with self._lock:
            own = self._begin(name)
        return self._ask(name, own)

    def forget(self, name: str) -> None:
        """Forget a name, and every other name of its collection.

        A request that is under way is answered, and not cached.
        """
        with self._lock:
            self._changes += 1
            found = self._cached.get(name)
            own = name if found is None else found.definition.name
            for each in {name, own, *self._aliases.get(own, ())}:
                self._drop(each)
                self._lookups.pop(each, None)

    @contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Forget a name before and after a change of its collection, whether the change succeeds or not."""
        self.forget(name)
        try:
            yield
        finally:
            self.forget(name)

    def _begin(self, name: str) -> _Lookup:
        made = self._lookups[name] = _Lookup(self._clock(), self._changes)
        return made

    def _ask(self, name: str, lookup: _Lookup) -> CollectionInfo:
        try:
            definition = self._fetch(name)
        except BaseException as error:
            self._end(name, lookup, None, dropped=isinstance(error, CollectionNotFound))
            if isinstance(error, Exception):
                lookup.answer.set_exception(error)
            else:
                lookup.answer.cancel()
            raise
        self._end(name, lookup, definition)
        lookup.answer.set_result(definition)
        return definition

    def _end(self, name: str, lookup: _Lookup, definition: CollectionInfo | None, *, dropped: bool = False) -> None:
        with self._lock:
            if self._lookups.get(name) is not lookup:
                return  # a newer request, or a change of the collection, came in between
            del self._lookups[name]
            if definition is None and not dropped:
                return
            self._drop(name)
            if definition is None or (definition.name != name and lookup.changes != self._changes):
                return  # the alias's collection may have changed, which was announced under its name
            self._cached[name] = _Cached(definition, lookup.began)
            if definition.name != name:
                self._aliases.setdefault(definition.name, set()).add(name)
            if len(self._cached) > self._max_names:
                self._drop(next(iter(self._cached)))

    def _drop(self, name: str) -> None:
        """Remove a name. Needs the lock."""
        found = self._cached.pop(name, None)
        if found is not None and (names := self._aliases.get(found.definition.name)) is not None:
            names.discard(name)
            if not names:
                del self._aliases[found.definition.name]

    def _refresh_soon(self, name: str) -> None:
        """Have a thread ask for a name. One thread asks for all, and ends when there are none. Needs the lock."""
        self._due[name] = None
        if not self._refreshing:
            self._refreshing = True
            threading.Thread(target=self._refresh, name="definitions", daemon=True).start()

    def _refresh(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._refreshing = False
                    return
                name, _ = self._due.popitem(last=False)
            try:
                self.renew(name)
            except Exception:
                # The next user of the name asks, and gets the error, once the definition is too old.
                _log.debug("cannot ask the catalog for collection %r", name, exc_info=True)
