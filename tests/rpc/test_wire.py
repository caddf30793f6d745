"""What crosses the wire between the log's server and its clients comes out as it went in."""

from __future__ import annotations

import inspect

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base import errors
from millrace.message.ids import LogId, LogIds
from millrace.rpc.wire import (
    MAX_ERROR_TEXT,
    NotAccepted,
    ack_from_bytes,
    ack_to_bytes,
    error_from_bytes,
    error_to_bytes,
    failure_to_bytes,
    from_json,
    is_valid_batch,
    log_id,
    request_of,
    to_json,
)
from tests.rpc.tampering import HOSTILE, tampered


def _takes_words_alone(kind: type[errors.MillraceError]) -> bool:
    """Whether nothing but the message is needed to make one."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return all(each.default is not each.empty or each.kind is not each.KEYWORD_ONLY for each in parameters)


PLAIN = sorted(
    (
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MillraceError) and _takes_words_alone(kind)
    ),
    key=lambda kind: kind.__name__,
)

ids = st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=20, unique=True).map(
    lambda pairs: [LogId(*pair) for pair in sorted(pairs)]
)


@given(ids)
def test_an_acknowledgement_carries_any_increasing_ids(given_ids: list[LogId]) -> None:
    assert ack_from_bytes(ack_to_bytes(given_ids)) == given_ids


@given(st.integers(0, 2**60), st.integers(0, 1000))
def test_consecutive_ids_take_a_few_bytes_however_many_they_are(first: int, count: int) -> None:
    as_list = [LogId(0, first + offset) for offset in range(count)]
    as_range = ack_to_bytes(LogIds(0, range(first, first + count)))
    assert ack_from_bytes(as_range) == as_list
    assert len(as_range) == len(ack_to_bytes(as_list)) < 32


@pytest.mark.parametrize("kind", PLAIN)
def test_an_error_comes_out_as_the_same_class(kind: type[errors.MillraceError]) -> None:
    found = error_from_bytes(error_to_bytes(kind("what to do")))
    assert type(found) is kind
    assert str(found) == "what to do"


def test_an_error_keeps_its_attributes() -> None:
    truncated = error_from_bytes(error_to_bytes(errors.PositionTruncated("gone", earliest=LogId(3, 4))))
    assert isinstance(truncated, errors.PositionTruncated)
    assert truncated.earliest == (3, 4)
    rejected = error_from_bytes(error_to_bytes(errors.AppendRejected("no", reason="TOO_LARGE")))
    assert isinstance(rejected, errors.AppendRejected)
    assert rejected.reason == "TOO_LARGE"
    lost = error_from_bytes(error_to_bytes(errors.TransactionLost("gone", reason="TXN_EXPIRED")))
    assert isinstance(lost, errors.TransactionLost)
    assert lost.reason == "TXN_EXPIRED"
    limited = error_from_bytes(error_to_bytes(errors.RateLimited("slowly", retry_after=2.5)))
    assert isinstance(limited, errors.RateLimited)
    assert limited.retry_after == 2.5


def test_a_long_error_is_cut_to_what_a_header_holds() -> None:
    assert len(str(error_from_bytes(error_to_bytes(errors.LogCorrupted("x" * 100_000))))) == MAX_ERROR_TEXT


def test_an_error_outside_the_family_comes_out_as_one_whose_effect_is_unknown() -> None:
    found = error_from_bytes(error_to_bytes(ZeroDivisionError("by zero")))
    assert isinstance(found, errors.LogUnavailable)
    assert "by zero" in str(found)


def test_an_error_of_a_newer_server_is_still_a_log_error_with_its_code() -> None:
    found = error_from_bytes(to_json({"code": "LOG_HAUNTED", "message": "boo", "attributes": {}}))
    assert isinstance(found, errors.LogError)
    assert str(found) == "LOG_HAUNTED: boo"


@given(st.binary(max_size=64))
def test_an_error_that_cannot_be_read_is_still_an_error(data: bytes) -> None:
    assert isinstance(error_from_bytes(data), errors.MillraceError)


def test_a_failed_append_raises_its_error_and_an_untaken_one_says_so() -> None:
    with pytest.raises(errors.EntryTooLarge, match="split"):
        ack_from_bytes(failure_to_bytes(errors.EntryTooLarge("split it")))
    with pytest.raises(NotAccepted):
        ack_from_bytes(failure_to_bytes(NotAccepted()))


@pytest.mark.parametrize("data", [b"\xff", b"[1]", b"1", b"{", b'"x"'])
def test_a_request_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(errors.InvalidArgument):
        from_json(data)


@pytest.mark.parametrize("data", [b'{"a": "\\udc80"}', b'{"\\uD800": 1}', b'{"a": [{"b": "x\\ud83d"}]}'])
def test_a_request_with_half_a_character_is_refused(data: bytes) -> None:
    """It would fail only where it becomes a name in a file or a store."""
    with pytest.raises(errors.InvalidArgument, match="UTF-8"):
        request_of(data)
    assert request_of(to_json({"a": "\U0001f600"})) == {"a": "\U0001f600"}


@pytest.mark.parametrize("value", [None, 3, [1], [1, "2"], [1, 2, 3], "1:2", {"ledger": 1}])
def test_a_position_of_another_form_is_refused(value: object) -> None:
    with pytest.raises(errors.InvalidArgument):
        log_id(value)


@pytest.mark.parametrize("how", HOSTILE)
def test_a_batch_whose_offsets_lead_elsewhere_is_not_sound(how: str) -> None:
    assert not is_valid_batch(tampered([b"right", b"right"], HOSTILE[how]))


def test_a_batch_that_holds_what_it_says_is_sound() -> None:
    plain = tampered([b"right", b"right"], [0, 5, 10])
    assert is_valid_batch(plain)
    assert is_valid_batch(plain.slice(1))
    assert is_valid_batch(pa.record_batch({"value": pa.array([None, b""], pa.large_binary())}))
    assert is_valid_batch(pa.record_batch({"value": pa.array([], pa.large_binary())}))
