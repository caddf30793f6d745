"""Under which names frames go out that the chain takes no more under their own, and that nobody ever sent.

A message is known to the chain by producer, epoch and sequence. While a spool waits, the chain may forget its producer (so many others
came), or be one that was restored from before it. What was never sent cannot have taken effect, so that it may go out as a new producer's:
from the message on that was refused, all of that producer, epoch and VChannel are that one's, in their order. Which, stands in
``<folder>/<PChannel>/renamed.json``, durable before the first of them is sent, so that a repeat has the same name.
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
    """Those of one PChannel's queue, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / _FILE
        self._names: dict[str, list[int]] = {}
        """By producer, epoch and VChannel: the new producer, the sequence that is its first, and that one's barrier tick: should the
        chain forget the new producer, too, it does not take a repeat of its first message for another."""
        if self._path.exists():
            self._names = json.loads(self._path.read_text())

    def __call__(self, message: MutableMessage) -> MutableMessage:
        """`message` as it is to be sent."""
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
        """Those of the spool's messages `first`, as they stand in it, and what follows each go out under new names; `tick` is one that
        the chain had reached when it refused them."""
        for message in first:
            self._names[_key(message)] = [secrets.randbits(62) + 1, message.sequence, tick]
        replace_json(self._path, self._names, synced=True)

    def clear(self) -> None:
        """Nothing is left that has a new name."""
        if self._names:
            self._names = {}
            self._path.unlink(missing_ok=True)
            sync(self._folder)


def _key(message: MutableMessage) -> str:
    return f"{message.producer_id} {message.epoch} {message.vchannel}"
