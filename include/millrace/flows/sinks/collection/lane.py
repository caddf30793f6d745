"""The journal of one lane of a flow into a collection, stored where the next owner finds it, on any machine.

The journal is a sequence of numbered files below the deployment's tables, ``flow-lanes/<flow>/<lane>/``. Each is
created only if its number is free, and the newest one counts. It has the batch that is being sent, the position after
it, and the positions of documents before that which the collection refused.

- Opening a lane claims it: the next file repeats the newest one. From then on the former owner's next number is taken,
  so it can journal nothing, and the new owner sends its journaled batch under the same numbers.
- A batch is decided when its file exists. Nothing of it is sent before, and all of it is sent afterwards, by the lane's
  owner.
- Each lane has its own producer id, so that workers of one flow do not fence each other at the chain.

A superseded file is removed. A writer that was suspended may create a number that was removed; it therefore looks for a
larger one before it sends anything.
"""

from __future__ import annotations

import io
import secrets
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from millrace.base.errors import MillraceError, SinkBusy, SinkRefused
from millrace.base.settings import Settings
from millrace.flows.sinks.collection.journal import InFlight, read_batch, write_batch
from millrace.flows.sinks.memory import Noted
from millrace.storage.closing import check_not_moved
from millrace.storage.store import ConditionalStore, conditional, store_at

LANES: Final = "flow-lanes"
"""Folder of the journals, below the deployment's tables."""
REASONS: Final = 1_000
"""The most refusals of a batch whose reasons are stored. For the others, only positions are."""
_REASON: Final = 200
"""The most characters of a stored reason."""
_TRIES: Final = 10
_SUFFIX: Final = ".arrow"


def forget_lanes(settings: Settings, flow: str) -> None:
    """Remove the journals of a deleted flow. Raises OSError."""
    store = store_at(settings.table_uri(f"{LANES}/{flow}"))
    for lane in store.folders():
        store.delete([f"{lane}/{name}" for name in store.list(lane)])


def close_lane(store: ConditionalStore, lane: str) -> str | None:
    """Claim a lane in the folder of its flow, so that its owner journals nothing more; return the newest file's name.

    None if the lane has no journal. Raises SinkBusy while other workers keep claiming it.
    """
    for _ in range(_TRIES):
        newest = max((name for name in store.list(lane) if name.endswith(_SUFFIX)), default=None)
        if newest is None:
            return None
        body = store.read(f"{lane}/{newest}")
        following = f"{int(newest.removesuffix(_SUFFIX)) + 1:020}{_SUFFIX}"
        if body is not None and store.put_if_absent(f"{lane}/{following}", body):
            return following
    raise SinkBusy(f"lane {lane}: its workers keep journaling: try again", retry_after=1.0)


class LaneJournal:
    """A lane that this process owns until another process claims it."""

    def __init__(self, settings: Settings, flow: str, lane: str, *, collection: int, generation: int | None) -> None:
        """Claim the lane.

        `collection` is the sink's id. A journal of another collection, or of an older generation, counts as empty.
        Without a `generation`, the journal's applies.

        Raises SinkBusy if other workers claim it at the same time or its position was set by hand since, and
        TablesMoved if the tables have moved.
        """
        self._root = settings.tables_uri
        self._asked = generation
        self.generation = generation or 0
        self._lane, self._collection = lane, collection
        try:
            self._store: ConditionalStore = conditional(store_at(settings.table_uri(f"{LANES}/{flow}")))
        except MillraceError as error:
            raise SinkRefused(f"lane {lane}: {error}") from None
        self._folder = quote(lane, safe="")
        self._number = 0
        self.producer_id = secrets.randbits(61) + 1
        self.position = 0
        """The position after the last journaled batch."""
        self.failures: dict[int, tuple[str, str]] = {}
        """Code and reason, by position before that, of documents that did not take effect."""
        self._batch: InFlight | None = None
        self._finished = False
        self._claim()

    # --- as JournalFiles ---------------------------------------------------------------------------------------------

    def noted(self) -> Noted:
        """Return 1 if everything that is journaled took effect, else 0."""
        return Noted(0 if self._batch is not None else 1)

    def load(self) -> InFlight | None:
        return self._batch

    def keep(self, batch: InFlight) -> None:
        self._finished, self._batch = False, batch
        if not self._put(batch):
            raise SinkBusy(f"lane {self._lane}: another worker has taken it over", retry_after=1.0)

    def done(self, noted: Noted) -> None:
        self._finished = True

    def close(self) -> None:
        """Note that the last batch is done, so that the next owner need not send it. Idempotent."""
        if self._finished and self._batch is not None and self._batch.groups:
            self._finished = False
            with suppress(MillraceError, OSError):
                self._put(InFlight(Noted(1), {}))

    # --- the lane ----------------------------------------------------------------------------------------------------

    def move(self, position: int, *, start: int, failures: dict[int, tuple[str, str]]) -> None:
        """Set what the next journaled batch stores: the position after it, and refusals from `start` on."""
        self.position = position
        self.failures = {place: each for place, each in self.failures.items() if place >= start} | failures

    def refuse(self, position: int, code: str, reason: str) -> None:
        """Add a refused document of the current batch; it is stored with the batch's next file."""
        self.failures[position] = (code, reason[:_REASON])

    def withdraw(self, position: int) -> None:
        """Store `position` instead of the one after the last batch, none of which took effect."""
        self.position = position
        self.failures = {place: each for place, each in self.failures.items() if place < position}
        self.keep(InFlight(Noted(1), {}))
        self._finished = True

    # --- files -------------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        for _ in range(_TRIES):
            self._number = self._newest()
            found: InFlight | None = None
            if self._number:
                body = self._store.read(self._path(self._number))
                if body is None:
                    continue  # its owner has journaled the next one in the meantime
                with pa.ipc.open_file(body) as reader:
                    found, facts = read_batch(reader)
                found = self._understood(found, facts["lane"])
            if self._put(found or InFlight(Noted(1), {})):
                # After the claim: a move claims each lane again before it copies it (millrace.operations.move).
                check_not_moved(self._root)
                self._batch = found
                return
        raise SinkBusy(f"lane {self._lane}: several workers claim it at the same time", retry_after=1.0)

    def _understood(self, batch: InFlight, facts: dict[str, Any]) -> InFlight | None:
        """Adopt the stored state; return the batch to send, if there is one."""
        self.producer_id = facts["producer_id"]
        if self._asked is None:
            self.generation = facts["generation"]
        if facts["generation"] > self.generation:
            raise SinkBusy(f"lane {self._lane}: its position was set by hand in the meantime", retry_after=1.0)
        self.position, self.failures = 0, {}
        if facts["generation"] < self.generation or facts["collection"] != self._collection:
            return None
        self.position = facts["position"]
        self.failures = {place: (code, reason) for place, code, reason in facts["failures"]}
        return batch if batch.groups else None

    def _put(self, batch: InFlight) -> bool:
        """Create the next file. Return False if another worker has the lane. Raises SinkBusy."""
        failures = [
            [place, code, reason if number < REASONS else ""]
            for number, (place, (code, reason)) in enumerate(sorted(self.failures.items()))
        ]
        facts = {
            "generation": self.generation, "collection": self._collection, "position": self.position,
            "failures": failures, "producer_id": self.producer_id,
        }  # fmt: skip
        body = io.BytesIO()
        write_batch(body, batch, {"lane": facts})
        number = self._number + 1
        try:
            if not self._store.put_if_absent(self._path(number), body.getvalue()):
                return False
            numbers = self._numbers()
            if max(numbers, default=0) > number:
                return False
            self._store.delete([self._path(each) for each in numbers if each < number])
        except OSError as error:
            raise SinkBusy(f"lane {self._lane}: its journal cannot be written: {error}", retry_after=1.0) from None
        self._number = number
        return True

    def _numbers(self) -> list[int]:
        names = self._store.list(self._folder)
        return [int(name.removesuffix(_SUFFIX)) for name in names if name.endswith(_SUFFIX)]

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:020}{_SUFFIX}"
