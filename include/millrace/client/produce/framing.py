"""How a producer's messages are framed into log entries: by count and by size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from millrace.message.model import MutableMessage

ENTRY_BYTES: Final = 4 << 20
"""Messages of one PChannel are framed into entries of about this size."""

MAX_ENTRY_MESSAGES: Final = 1_000

_T = TypeVar("_T")


def group_into_entries(items: Iterable[_T], size: Callable[[_T], int]) -> Iterator[list[_T]]:
    """Runs of `items`, in order, that go out as one entry each: of about ENTRY_BYTES and at most MAX_ENTRY_MESSAGES."""
    run: list[_T] = []
    held = 0
    for item in items:
        bytes_ = size(item)
        if run and (held + bytes_ > ENTRY_BYTES or len(run) == MAX_ENTRY_MESSAGES):
            yield run
            run, held = [], 0
        run.append(item)
        held += bytes_
    if run:
        yield run


def group_messages(messages: Iterable[MutableMessage]) -> Iterator[list[MutableMessage]]:
    """Runs of messages that go out as one entry each, by the size of their payloads."""
    return group_into_entries(messages, lambda message: len(message.payload))
