"""Stamps: who appended an entry is in it, and nobody but the server that appends it says so."""

from __future__ import annotations

import crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.model import MutableMessage
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.framing import check_framing
from millrace.message.wire.stamp import stamp_entries
from tests.message.samples import entries, runs
from tests.message.wire.test_entries import messages_of

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


def array(values: list[bytes]) -> pa.LargeBinaryArray:
    return pa.array(values, pa.large_binary())


def stamped(values: list[bytes], principal: str) -> list[bytes]:
    found: list[bytes] = stamp_entries(array(values), principal).to_pylist()
    return found


@given(st.lists(st.tuples(runs(), st.one_of(st.just(""), NAMES)), min_size=1, max_size=6), NAMES, st.data())
def test_stamped_entries_hold_their_messages_and_one_name_whatever_stamp_they_had(
    framed: list[tuple[list[MutableMessage], str]], name: str, data: st.DataObject
) -> None:
    plain = [encode_entry(run) for run, _ in framed]
    given = [encode_entry(run, principal=claimed) for run, claimed in framed]
    cut = data.draw(st.integers(0, len(framed) - 1))
    found = stamp_entries(array(given).slice(cut), name)
    assert check_framing(found) is None
    assert found.to_pylist() == stamped(plain[cut:], name)
    for value in found.to_pylist():
        assert value[4:8] == crc32c.crc32c(value[8:]).to_bytes(4, "little")
    decoded = decode_entries(entries(found.to_pylist()))
    decoded.validate(full=True)
    assert messages_of(decoded) == [message for run, _ in framed[cut:] for message in run]
    assert set(decoded.column("principal").to_pylist()) == {name}
    assert stamped(found.to_pylist(), "") == plain[cut:]


@given(runs(), NAMES, st.sampled_from(["", "eve"]), st.data())
def test_an_entry_that_was_damaged_before_it_was_stamped_stays_damaged(
    run: list[MutableMessage], name: str, claimed: str, data: st.DataObject
) -> None:
    draft = bytearray(encode_entry(run, principal=claimed))
    place = data.draw(st.integers(41, len(draft) - 1))
    draft[place] ^= data.draw(st.integers(1, 255))
    for principal in (name, ""):
        if principal or claimed:
            [row] = decode_entries(entries(stamped([bytes(draft)], principal))).to_pylist()
            assert row["type"] == 0
            assert row["principal"] is None


def test_a_producer_s_own_stamp_is_shown_as_asserted() -> None:
    value = encode_entry([MutableMessage(type=1200)] * 3, principal="etl")
    assert decode_entries(entries([value])).column("principal").to_pylist() == ["asserted:etl"] * 3


def test_a_message_that_does_not_decode_still_names_who_appended_it() -> None:
    value = bytearray(encode_entry([MutableMessage(type=1200, vchannel="p0_1v0")]))
    value[-1] = 0xFF  # the name of its VChannel is not UTF-8
    value[4:8] = crc32c.crc32c(value[8:]).to_bytes(4, "little")
    [row] = decode_entries(entries(stamped([bytes(value)], "eve"))).to_pylist()
    assert (row["type"], row["principal"]) == (0, "eve")


def test_entries_of_several_principals_and_of_none_decode_together() -> None:
    one = encode_entry([MutableMessage(type=1200)] * 2)
    values = [*stamped([one], "a"), one, *stamped([one], "b"), *stamped([one], "a")]
    wanted = ["a", "a", None, None, "b", "b", "a", "a"]
    assert decode_entries(entries(values)).column("principal").to_pylist() == wanted


def test_a_stamp_costs_its_name_and_no_more() -> None:
    one = encode_entry([MutableMessage(type=400, payload=b"x" * 100)] * 1000)
    assert len(stamped([one], "ingest-service")[0]) == len(one) + len("ingest-service")


def test_a_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 255 bytes"):
        stamp_entries(array([encode_entry([MutableMessage(type=1200)])]), "x" * 256)
