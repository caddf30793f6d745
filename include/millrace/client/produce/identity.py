"""Who a producer is: its id, and the epochs that fence whoever had the id before."""

from __future__ import annotations

import threading
from typing import Protocol


class TermSource(Protocol):
    """Who knows the open term of a PChannel and the epochs of producers: the coordinator."""

    def term(self, pchannel: str) -> int: ...

    def next_epoch(self, producer_id: int, *, held: int | None = None) -> int: ...


class ProducerIdentity:
    """A producer's id and its newest epoch, shared by its lanes. An id of the caller's has its epochs from the coordinator."""

    def __init__(self, producer_id: int, terms: TermSource, *, owned: bool, epoch: int | None = None) -> None:
        self.id = producer_id
        self.terms = terms
        self._owned = owned
        self._lock = threading.Lock()
        self.epoch = epoch if epoch is not None else terms.next_epoch(producer_id) if owned else 1

    def renew(self, after: int) -> int:
        """An epoch above `after`. Raises ProducerFenced where a newer producer has the id."""
        with self._lock:
            if self.epoch <= after:
                held = self.epoch
                self.epoch = self.terms.next_epoch(self.id, held=held) if self._owned else after + 1
            return self.epoch
