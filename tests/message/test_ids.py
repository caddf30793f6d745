"""Ids of consecutive entries behave as the list of them; a moment in any form is one time tick."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.message.ids import (
    LogId,
    LogIds,
    compose_tick,
    pchannel_of,
    resolve_tick,
    split_channel,
    tick_physical_ms,
)


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


def test_a_datetime_stands_for_the_last_tick_of_its_millisecond() -> None:
    moment = datetime(2025, 6, 15, 12, 0, 0, 123_999, tzinfo=UTC)
    tick = resolve_tick(moment)
    assert tick_physical_ms(tick) == int(datetime(2025, 6, 15, 12, tzinfo=UTC).timestamp()) * 1000 + 123
    assert tick + 1 == compose_tick(tick_physical_ms(tick + 1))
    assert resolve_tick(moment + timedelta(milliseconds=1)) > tick


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("460012345678901234", 460012345678901234),
        ("2025-06-15T12:00:00.123Z", datetime(2025, 6, 15, 12, 0, 0, 123_000, tzinfo=UTC)),
        ("2025-06-15T14:00+02:00", datetime(2025, 6, 15, 12, tzinfo=UTC)),
        ("2025-06-15 12:00", datetime(2025, 6, 15, 12, tzinfo=UTC)),
        ("2025-06-15", datetime(2025, 6, 15, tzinfo=UTC)),
    ],
)
def test_text_is_the_tick_or_the_moment_that_it_writes_in_utc_where_it_names_no_zone(text: str, same: Any) -> None:
    assert resolve_tick(text) == resolve_tick(same)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (datetime(2025, 6, 15), "needs a time zone"),  # noqa: DTZ001
        (datetime(1969, 12, 31, tzinfo=UTC), "before 1970"),
        ("yesterday", "2026-11-21T10:15:00Z"),
        ("٣", "neither a time tick nor"),
        ("9" * 19, "at most"),
        ("9" * 5000, "neither a time tick nor"),
        (-1, "not negative"),
        (1 << 63, "at most"),
        (1.5, "not float"),
        (True, "not bool"),
        (datetime(2025, 6, 15, tzinfo=UTC).date(), "not date"),
    ],
)
def test_what_is_no_moment_is_refused_and_told_what_one_is(value: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        resolve_tick(value)


@pytest.mark.parametrize("pchannel", ["p0", "dml_0", "by-dev-rootcoord-dml_3", "a_1v2_x"])
def test_a_vchannels_name_tells_its_pchannel(pchannel: str) -> None:
    vchannel = f"{pchannel}_449v11"
    assert pchannel_of(vchannel) == pchannel
    assert split_channel(vchannel) == (pchannel, vchannel)
    assert split_channel(pchannel) == (pchannel, "")
