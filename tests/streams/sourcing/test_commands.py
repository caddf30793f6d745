"""Conditional messages whose numbers the chain refuses again and again have a verdict in bounded time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from millrace.base.errors import DeadlineExceeded
from millrace.message.ids import MessageId
from millrace.message.model import MutableMessage
from millrace.streams.sourcing.commands import stream_id
from millrace.streams.sourcing.groups import Appended, Command
from millrace.wal.reasons import Reason
from tests.streams.sourcing.conftest import Open
from tests.streams.sourcing.flying import flown

REFUSED = f"{MessageId(0, 0, 0, 0)}@3 {Reason.CHECK_VIOLATED}"


def test_numbers_that_are_refused_again_and_again_end_with_a_typed_error(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused command used the sequence up, then the chain has forgotten the aggregate, and so on."""
    store = opened()
    store.append_all([Command(name, [flown(1)], 0) for name in ("N1", "N2")])
    sender = store._appender._sender._sender
    sent, database, sequences, began = sender._sent, sender._database, list[int](), time.monotonic()

    def answer(messages: Sequence[MutableMessage]) -> list[dict[str, object]]:
        mine = [each for each in messages if each.producer_id == stream_id("N1")]
        if not mine:
            return sent(messages)
        assert time.monotonic() - began < 10, "it does not end"
        sequences.append(mine[0].sequence)
        refused = (Reason.DUPLICATE, REFUSED) if len(sequences) % 2 else (Reason.UNKNOWN_PRODUCER, "begin with 0")
        others = iter(sent([each for each in messages if each is not mine[0]]) if len(messages) > 1 else [])
        row: dict[str, object] = {"reason": refused[0], "detail": refused[1], "time_tick": 3}
        return [row if each is mine[0] else next(others) for each in messages]

    settings = replace(database.settings, append_deadline=0.2)
    hasty = SimpleNamespace(settings=settings, catalog=database.catalog, connection=database.connection)
    monkeypatch.setattr(sender, "_database", hasty)
    monkeypatch.setattr(sender, "_sent", answer)
    commands = [Command("N1", [flown(2)]), Command("N1", [flown(3)]), Command("N2", [flown(2)])]
    found = store.append_all(commands)
    assert [type(each) for each in found] == [DeadlineExceeded, DeadlineExceeded, Appended]
    assert "nothing was appended" in str(found[0])
    assert sequences[:5] == [0, 1, 0, 1, 0]
    assert sequences.count(0) + sequences.count(1) == len(sequences)
    monkeypatch.undo()
    again = store.append_all(commands[:2])
    assert [(each.version, each.repeated) for each in again if isinstance(each, Appended)] == [(2, False), (3, False)]
