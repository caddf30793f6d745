"""Ids of consecutive entries behave as the list of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.message.ids import LogId, LogIds


@given(st.integers(0, 2**60), st.integers(0, 2**60), st.integers(0, 20), st.slices(20))
def test_consecutive_ids_are_the_list_of_them(ledger: int, first: int, count: int, cut: slice) -> None:
    ids, plain = LogIds(ledger, range(first, first + count)), [LogId(ledger, first + n) for n in range(count)]
    assert list(ids) == plain
    assert all(type(each) is LogId for each in ids)
    assert len(ids) == count
    assert ids == plain
    assert plain == ids
    assert ids[cut] == plain[cut]
    assert LogIds(ledger, ids.entries) == ids
    assert LogIds(ledger + 1, ids.entries) == ids if not count else LogIds(ledger + 1, ids.entries) != ids
    assert ids != [*plain, LogId(ledger, first + count)]
    assert ids != 1
    assert ids + ids == plain + ids == ids + plain == plain * 2
    if count:
        assert (ids[0], ids[-1]) == (plain[0], plain[-1])
        assert plain[-1] in ids
    with pytest.raises(IndexError):
        ids[count]
