"""Losses proved by the messages' numbers: missing numbers between a sender's first and greatest.

A late message, within the newest WINDOW numbers, is subtracted from the lost ones again. A number that is far from the
last one, in either direction, means that the sender restarted; it proves nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 1024
"""Numbers before a sender's greatest that may still arrive."""
MAX_GAP: Final = 1_000_000
"""The most numbers that may be lost at once. A larger jump means that the sender restarted."""
MAX_SENDERS: Final = 1024
"""The most senders that are remembered, the last active ones."""


@dataclass(slots=True)
class _Sender:
    greatest: int
    missing: set[int] = field(default_factory=set)
    """Numbers of the last WINDOW that have not arrived yet."""


class SequenceTracker:
    """Follows the numbers of each sender. Not thread-safe."""

    def __init__(self, width: int | None, greatest: Mapping[str, int] | None = None) -> None:
        """`width` is the size of a number in bytes, at whose greatest value it wraps to 0; None if it is unlimited.

        `greatest` has the greatest number of each sender, from an earlier tracker.
        """
        self._modulus = None if width is None else 1 << (8 * width)
        self._window = WINDOW if self._modulus is None else min(WINDOW, self._modulus // 2 - 1)
        self._senders: OrderedDict[str, _Sender] = OrderedDict(
            (name, _Sender(number)) for name, number in (greatest or {}).items()
        )
        self.counts = Counter[str]()
        """lost, late (arrived after later ones), repeated, restarts (of senders), forgotten (senders)."""

    def greatest(self) -> dict[str, int]:
        """Return the greatest number of each sender."""
        return {name: each.greatest for name, each in self._senders.items()}

    def see(self, sender: str, number: int) -> None:
        """Count a message."""
        known = self._senders.get(sender)
        if known is None:
            self._senders[sender] = _Sender(number)
            if len(self._senders) > MAX_SENDERS:
                self._senders.popitem(last=False)
                self.counts["forgotten"] += 1
            return
        self._senders.move_to_end(sender)
        ahead = self._ahead(known.greatest, number)
        if ahead == 0:
            self.counts["repeated"] += 1
        elif 0 < ahead <= MAX_GAP:
            self.counts["lost"] += ahead - 1
            # A number that wraps comes again for another message, so none is remembered longer than the window.
            if ahead > self._window:
                known.missing.clear()
            elif known.missing:
                passed = range(-self._window, ahead - self._window)
                known.missing.difference_update(self._after(known.greatest, step) for step in passed)
            first = max(1, ahead - self._window)
            known.missing.update(self._after(known.greatest, step) for step in range(first, ahead))
            known.greatest = number
        elif -self._window <= ahead < 0:
            if number in known.missing:
                known.missing.discard(number)
                self.counts["lost"] -= 1
                self.counts["late"] += 1
            else:
                self.counts["repeated"] += 1
        else:
            self._senders[sender] = _Sender(number)
            self.counts["restarts"] += 1

    def _ahead(self, greatest: int, number: int) -> int:
        """Return how far `number` is after `greatest`; negative if it is before."""
        if self._modulus is None:
            return number - greatest
        ahead = (number - greatest) % self._modulus
        return ahead if ahead <= self._modulus // 2 else ahead - self._modulus

    def _after(self, number: int, steps: int) -> int:
        return number + steps if self._modulus is None else (number + steps) % self._modulus
