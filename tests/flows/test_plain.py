"""Plain records are what they stand for, and pass a flow without steps as they would one by one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.flows.plain import PlainActions, PlainRecords, bodies, offsets, removed_ids, value_bytes
from millrace.flows.records import OPERATION, Action, Record
from millrace.flows.transform.operators import MAX_DOCUMENT_BYTES
from millrace.flows.transform.transform import OWN, Rules, Transform

TRUNCATION = Record("d.t", 0, 0, None, None, 1, [(OPERATION, b"t")])


def plain(records: list[Record]) -> PlainRecords:
    keys = [(each.key or b"").decode() if each.value is None else "" for each in records]
    values = [each.value for each in records]
    return PlainRecords([each.offset for each in records], values, keys, records.__getitem__)


def put(offset: int, value: bytes | None) -> Record:
    return Record("d.t", 0, offset, f"k{offset}".encode(), value, 1, [(OPERATION, b"c")])


_values = st.one_of(st.none(), st.integers().map(lambda each: b'{"id":%d,"n":1.50}' % each))


@given(st.booleans(), st.lists(_values, max_size=8), st.lists(st.slices(8), max_size=3))
def test_any_part_of_plain_records_is_that_part_of_the_records(
    truncated: bool, values: list[bytes | None], slices: list[slice]
) -> None:
    records = [TRUNCATION] * truncated + [put(3 * place + 1, each) for place, each in enumerate(values)]
    found, actions = plain(records), PlainActions(plain(records))
    for each in slices:
        found, actions, records = found[each], actions[each], records[each]
    assert list(found) == records
    assert (list(found.offsets), list(found.values)) == (
        [each.offset for each in records], [each.value for each in records],
    )  # fmt: skip
    listed = list(actions)
    assert [each.record for each in listed] == records
    for given_as in (actions, listed):
        assert list(bodies(given_as)) == [each.value for each in records]
        assert list(offsets(given_as)) == [each.offset for each in records]
        assert removed_ids(given_as) == [(each.key or b"").decode() for each in records if each.value is None]
    assert value_bytes(found) == value_bytes(records) == sum(len(each.value or b"") for each in records)


@given(
    st.booleans(),
    st.lists(_values, max_size=8),
    st.sampled_from(["delete", "ignore", "error"]),
    st.booleans(),
)
def test_plain_records_pass_a_flow_without_steps_as_they_do_one_by_one(
    truncated: bool, values: list[bytes | None], tombstones: str, truncates: bool
) -> None:
    records = [TRUNCATION] * truncated + [put(place + 1, each) for place, each in enumerate(values)]
    transform = Transform(Rules((), OWN, False, tombstones, truncates=truncates))
    whole, one_by_one = transform.run(plain(records)), transform.run(records)
    assert [_decoded(each) for each in whole.actions] == [_decoded(each) for each in one_by_one.actions]
    assert (whole.failures, whole.filtered) == (one_by_one.failures, one_by_one.filtered)


def _decoded(action: Action) -> tuple[Record, str, object, int | None]:
    return action.record, action.id, action.body and msgspec.json.decode(action.body), action.version


def test_a_plain_record_that_is_too_large_is_a_failure() -> None:
    records = [put(1, b'{"id":1}'), put(2, b'{"id":"%s"}' % (b"x" * MAX_DOCUMENT_BYTES))]
    done = Transform(Rules((), OWN, False, "delete")).run(plain(records))
    assert ([each.record.offset for each in done.actions], [each.kind for each in done.failures]) == (
        [1],
        ["TOO_LARGE"],
    )


def test_a_place_after_the_last_record_is_none() -> None:
    with pytest.raises(IndexError):
        PlainActions(plain([put(1, None)]))[1]
