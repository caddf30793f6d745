"""New producer ids for spooled messages that the chain no longer accepts and that were never sent.

The chain recognizes a message by producer, epoch and sequence. While a spool waits, the chain may forget its producer
(because of many others), or be restored to a state before it. A message that was never sent cannot have taken effect,
so it may be sent as a new producer's: from the refused message on, all messages of its producer, epoch and VChannel get
the new id, in order. The mapping is in ``<folder>/<PChannel>/renamed.json``, durable before the first of them is sent,
so that a repeat has the same id.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from millrace.base.files import replace_json, sync
from millrace.message.model import MutableMessage

_FILE = "renamed.json"


class ProducerRemap:
    """The mapping of one PChannel's queue, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE
        self._names: dict[str, list[int]] = {}
        """The new producer, its first sequence, and that message's barrier tick, by old producer, epoch and VChannel.

        With the barrier, the chain recognizes a repeat of the first message even if it forgets the new producer, too.
        """
        if self._path.exists():
            self._names = json.loads(self._path.read_text())

    def __call__(self, message: MutableMessage) -> MutableMessage:
        """Return `message` as it is to be sent."""
        found = self._names.get(_key(message))
        if found is None or message.sequence < found[1]:
            return message
        number, first, tick = found
        barrier = tick if message.sequence == first else 0
        return replace(
            message,
            producer_id=number,
            epoch=1,
            sequence=message.sequence - first,
            barrier_tick=max(message.barrier_tick, barrier),
        )

    def assign(self, first: Iterable[MutableMessage], tick: int) -> None:
        """Assign new producers to the spool's messages `first` and all that follow each.

        `tick` is one that the chain had reached.
        """
        for message in first:
            self._names[_key(message)] = [secrets.randbits(62) + 1, message.sequence, tick]
        replace_json(self._path, self._names, synced=True)

    def clear(self) -> None:
        """Remove the mapping once no message needs it."""
        if self._names:
            self._names = {}
            self._path.unlink(missing_ok=True)
            sync(self._folder)


def _key(message: MutableMessage) -> str:
    return f"{message.producer_id} {message.epoch} {message.vchannel}"
