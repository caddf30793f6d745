"""A pipelined append stream merges what has arrived, and answers each append as if it had been alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pyarrow as pa
import pytest

from millrace.base.errors import EntryTooLarge, InvalidArgument, LogUnavailable
from millrace.log.server.append_stream import serve_appends
from millrace.message.ids import LogId, LogIds
from millrace.rpc.wire import NotAccepted, ack_from_bytes
from tests.rpc.tampering import HOSTILE, tampered

PATIENCE = 20.0


class Stream:
    """A client's stream whose batches have all arrived before the first append is done."""

    def __init__(self, *batches: list[bytes | None] | pa.RecordBatch) -> None:
        self._batches = [
            batch
            if isinstance(batch, pa.RecordBatch)
            else pa.record_batch({"value": pa.array(batch, pa.large_binary())})
            for batch in batches
        ]
        self.read_all = threading.Event()
        self.answers: list[bytes] = []
        self.appended: list[list[bytes]] = []

    def read_chunk(self) -> SimpleNamespace:
        if not self._batches:
            self.read_all.set()
            raise StopIteration
        return SimpleNamespace(data=self._batches.pop(0))

    def write_metadata(self, answer: pa.Buffer) -> None:
        self.answers.append(answer.to_pybytes())

    def append(self, values: pa.LargeBinaryArray, *, alone: bool = True) -> LogIds:
        assert self.read_all.wait(PATIENCE)
        plain = values.to_pylist()
        if b"ambiguous" in plain:
            self.appended.append(plain)
            raise LogUnavailable("the disk went away")
        if b"late" in plain:
            raise NotAccepted
        if b"too large" in plain:
            raise EntryTooLarge("split it")
        first = sum(map(len, self.appended))
        self.appended.append(plain)
        return LogIds(0, range(first, first + len(plain)))

    def log(self) -> list[bytes]:
        return [value for values in self.appended for value in values]

    def serve(self, *, cancelled_after: int = 1 << 30) -> None:
        serve_appends(self, self, self.append, pipelined=True, cancelled=lambda: len(self.appended) >= cancelled_after)


def test_what_arrived_during_an_append_is_the_next_append() -> None:
    stream = Stream([b"first"], [b"a", b"b"], [b"c"], [b"d", b"e", b"f"])
    stream.serve()
    assert stream.log() == [b"first", b"a", b"b", b"c", b"d", b"e", b"f"]
    assert len(stream.appended) <= 2
    assert [len(ack_from_bytes(answer)) for answer in stream.answers] == [1, 2, 1, 3]
    assert [each.entry for answer in stream.answers for each in ack_from_bytes(answer)] == list(range(7))


def test_one_at_fault_fails_alone() -> None:
    stream = Stream([b"first"], [b"a"], [b"never", b"too large"], [b"b"])
    stream.serve()
    assert stream.log() == [b"first", b"a", b"b"]
    first, a, bad, b = stream.answers
    assert [ack_from_bytes(answer) for answer in (first, a, b)] == [[LogId(0, n)] for n in range(3)]
    with pytest.raises(EntryTooLarge):
        ack_from_bytes(bad)


def test_an_ambiguous_append_is_ambiguous_for_all_that_were_merged_and_not_tried_again() -> None:
    stream = Stream([b"a"], [b"ambiguous"], [b"b"])
    stream.serve()
    assert stream.log().count(b"ambiguous") == 1
    with pytest.raises(LogUnavailable):
        ack_from_bytes(stream.answers[1])


def test_a_stopping_server_answers_all_that_it_did_not_take() -> None:
    stream = Stream([b"late"], [b"late"], [b"late"])
    stream.serve()
    assert stream.appended == []
    for answer in stream.answers:
        with pytest.raises(NotAccepted):
            ack_from_bytes(answer)
    assert len(stream.answers) == 3


def test_a_null_is_refused_and_its_neighbours_are_not() -> None:
    stream = Stream([b"a"], [None], [b"b"])
    stream.serve()
    assert stream.log() == [b"a", b"b"]
    with pytest.raises(InvalidArgument):
        ack_from_bytes(stream.answers[1])


def test_nothing_is_appended_for_a_client_that_gave_up() -> None:
    stream = Stream([bytes(3 << 20)], [bytes(3 << 20)], [b"behind"])
    stream.serve(cancelled_after=1)
    assert len(stream.appended) == 1
    assert b"behind" not in stream.appended[0]


@pytest.mark.parametrize("how", HOSTILE)
def test_a_batch_whose_offsets_lead_elsewhere_is_refused_before_anything_of_it_is_read(how: str) -> None:
    stream = Stream([b"first"], tampered([b"right", b"right"], HOSTILE[how]), [b"last"])
    stream.serve()
    assert stream.log() == [b"first", b"last"]
    with pytest.raises(InvalidArgument, match="one column"):
        ack_from_bytes(stream.answers[1])
    assert len(stream.answers) == 3
