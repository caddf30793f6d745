"""What a pipeline says of the appends behind one that failed.

Refused is only what the server refused, the rest may be written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.deadline import Deadline
from millrace.base.errors import AssignmentStale, EntryTooLarge, LogUnavailable, MillraceError, ServerFull
from millrace.rpc.append_pipeline import AppendFuture, AppendPipeline
from millrace.rpc.link import ConnectionLost, NotAccepted

Answer = int | Exception


class Server:
    """The protocols Connector and Stream.

    A server that answers by a script; the stream of the last answer has ended with it.
    """

    deadline = 5.0

    def __init__(self, *answers: Answer, ends: bool = False, on_drop: Callable[[], None] = lambda: None) -> None:
        self._answers = list(answers)
        self._ends = ends
        self._on_drop = on_drop
        self.streams = 0
        self.moves = 0

    @property
    def ended(self) -> bool:
        return self._ends and not self._answers

    def link(self, deadline: Deadline) -> Any:
        return self

    def check(self) -> None:
        """The connection stands."""

    def drop_link(self, link: Any) -> None:
        self._on_drop()

    def mark_stale(self) -> None:
        self.moves += 1

    def open(self, link: Any) -> Any:
        self.streams += 1
        return self

    def send(self, values: pa.LargeBinaryArray, *, deadline: Deadline) -> None:
        """It takes everything."""

    def receive(self, *, deadline: Deadline) -> int:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Nothing to release."""


def sent(server: Server, count: int = 3) -> tuple[AppendPipeline[int], list[AppendFuture[int]]]:
    pipeline = AppendPipeline(server, server.open)
    return pipeline, [pipeline.submit(b"x") for _ in range(count)]


def outcome(pending: AppendFuture[int]) -> int | str:
    try:
        return pending.result()
    except MillraceError as error:
        return type(error).__name__


def test_behind_a_stale_append_the_others_may_be_written() -> None:
    server = Server(AssignmentStale("another has it"))
    pipeline, pendings = sent(server)
    assert [outcome(each) for each in pendings] == ["AssignmentStale", "LogUnavailable", "LogUnavailable"]
    with pytest.raises(LogUnavailable, match="unknown"):
        pendings[1].result()
    pipeline.submit(b"y")
    assert (server.streams, server.moves) == (2, 1), "the next one asks who has it, and goes out on a new stream"


def test_behind_an_append_that_was_not_taken_each_other_one_has_its_own_answer() -> None:
    _, pendings = sent(Server(NotAccepted(), 7, NotAccepted()))
    assert [outcome(each) for each in pendings] == ["ServerStopping", 7, "ServerStopping"]
    with pytest.raises(LogUnavailable, match="not in the log"):
        pendings[0].result()


def test_an_append_that_is_refused_alone_says_nothing_of_those_behind_it() -> None:
    _, pendings = sent(Server(EntryTooLarge("split it"), 8, 9))
    assert [outcome(each) for each in pendings] == ["EntryTooLarge", 8, 9]


def test_of_a_stream_that_was_not_let_in_every_append_is_refused() -> None:
    _, pendings = sent(Server(ServerFull("too many streams"), ends=True))
    assert [outcome(each) for each in pendings] == ["ServerFull"] * 3


def test_of_a_stream_that_ends_in_its_midst_what_is_behind_the_refused_append_may_be_written() -> None:
    _, pendings = sent(Server(5, ServerFull("too many streams"), ends=True))
    assert [outcome(each) for each in pendings] == [5, "ServerFull", "LogUnavailable"]
    with pytest.raises(LogUnavailable, match="unknown"):
        pendings[2].result()


def test_every_append_of_a_broken_connection_is_answered_though_dropping_it_fails() -> None:
    def fails() -> None:
        raise KeyError("it was dropped by another")

    _, pendings = sent(Server(ConnectionLost("reset"), on_drop=fails))
    with pytest.raises(KeyError):
        pendings[0].result()
    assert [outcome(each) for each in pendings] == ["LogUnavailable"] * 3
