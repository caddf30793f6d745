"""Search in the WAL: pages agree with sorting everything, whatever the files; files that cannot matter stay closed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import hypothesis
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from millrace.base.errors import InvalidArgument
from millrace.observe.table_cache import TableSnapshot
from millrace.observe.wal_search import Cursor, WalQuery, find_message, search_wal
from millrace.storage.table import open_table
from millrace.tables.wal.table import TABLE_SCHEMA, WalTable

REASONS = ("MALFORMED", "DUPLICATE", "TERM_FENCED")
DAY_MS = 86_400_000
START_MS = 1_700_000_000_000


def _row(number: int, *, pchannel: str, tick: int, reason: str, ms: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        field.name: (0 if pa.types.is_integer(field.type) else None) for field in TABLE_SCHEMA if field.name != "date"
    }
    return values | {
        "time_tick": tick, "entry": number, "physical_ms": ms, "type": "INSERT", "vchannel": f"{pchannel}_1v0",
        "reason": reason, "detail": "d", "payload": b"p%d" % number, "kind": "rejection", "pchannel": pchannel,
        "date": ms // DAY_MS,
    }  # fmt: skip


def _table(path: Path, batches: list[list[dict[str, Any]]]) -> TableSnapshot:
    """A wal table with a commit (and files of its own) for each batch."""
    WalTable.create(path)
    for rows in filter(None, batches):
        write_deltalake(str(path), pa.Table.from_pylist(rows, schema=TABLE_SCHEMA), mode="append")
    table = open_table(path)
    assert table is not None
    return TableSnapshot(table)


class Stored:
    """The table and every row in the order of a search."""

    def __init__(self, pinned: TableSnapshot, every: list[dict[str, Any]]) -> None:
        self.pinned = pinned
        self.every = every


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("time_tick", "pchannel", "ledger", "entry", "index", "ordinal"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """600 rejections of two PChannels over two days in 12 commits, many with equal ticks."""
    dice = random.Random(7)
    batches: list[list[dict[str, Any]]] = []
    ticks = {"dml_0": START_MS << 18, "dml_1": START_MS << 18}
    for commit in range(12):
        rows = []
        for place in range(50):
            pchannel = dice.choice(list(ticks))
            ms = START_MS + commit * DAY_MS // 8 + place
            ticks[pchannel] = max(ticks[pchannel], (ms << 18) if dice.random() < 0.3 else ticks[pchannel])
            number = commit * 50 + place
            rows.append(_row(number, pchannel=pchannel, tick=ticks[pchannel], reason=dice.choice(REASONS), ms=ms))
        batches.append(rows)
    every = sorted((row for rows in batches for row in rows), key=_key, reverse=True)
    return Stored(_table(tmp_path_factory.mktemp("search") / "wal", batches), every)


@hypothesis.settings(max_examples=40)
@given(
    limit=st.integers(1, 70),
    bound=st.integers(1, 900),
    pchannel=st.sampled_from(["", "dml_0", "dml_1", "dml_9"]),
    reason=st.sampled_from(["", *REASONS]),
    window=st.none() | st.tuples(st.integers(-1, 14), st.integers(-1, 14)),
)
def test_pages_follow_each_other_without_gap_or_double(
    stored: Stored,
    limit: int,
    bound: int,
    pchannel: str,
    reason: str,
    window: tuple[int, int] | None,
) -> None:
    pinned, every = stored.pinned, stored.every
    since, until = (None, None) if window is None else (START_MS + each * DAY_MS // 8 for each in window)
    query = WalQuery("rejection", pchannel=pchannel, reason=reason, since_ms=since, until_ms=until)
    expected = [
        row["entry"]
        for row in every
        if pchannel in ("", row["pchannel"])
        and reason in ("", row["reason"])
        and (since is None or row["physical_ms"] >= since)
        and (until is None or row["physical_ms"] <= until)
    ]
    found: list[int] = []
    before: Cursor | None = None
    for _ in range(700):
        page = search_wal(pinned, query, limit=limit, before=before, bound=bound)
        assert len(page.rows) <= limit
        found += [row["entry"] for row in page.rows]
        if page.next is None:
            break
        assert before is None or page.next < before, "a search always gets on"
        before = Cursor.parse(str(page.next))
    assert found == expected


def test_the_newest_page_opens_the_newest_files_alone(stored: Stored) -> None:
    pinned, every = stored.pinned, stored.every
    page = search_wal(pinned, WalQuery("rejection"), limit=10)
    assert [row["entry"] for row in page.rows] == [row["entry"] for row in every[:10]]
    assert page.files < len(pinned.column("path")) / 2
    assert search_wal(pinned, WalQuery("rejection", until_ms=START_MS - 3 * DAY_MS), limit=10).files == 0
    assert search_wal(pinned, WalQuery("message"), limit=10).files == 0


def test_payloads_are_read_for_one_message_only(stored: Stored) -> None:
    pinned, every = stored.pinned, stored.every
    assert "payload" not in search_wal(pinned, WalQuery("rejection"), limit=1).rows[0]
    row = every[17]
    found = find_message(pinned, row["pchannel"], (0, row["entry"], 0, 0))
    assert found is not None
    assert found[0]["payload"] == b"p%d" % row["entry"]
    assert find_message(pinned, row["pchannel"], (0, row["entry"], 1, 0)) is None
    assert find_message(pinned, "dml_9", (0, row["entry"], 0, 0)) is None


@pytest.mark.parametrize("text", ["", "1", "a~b~c~d~e~f", "-1~dml_0~0~0~0~0", f"{1 << 63}~x~0~0~0~0", "1~x~0~0~0~1e3"])
def test_a_cursor_is_what_a_search_gave(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Cursor.parse(text)


def test_a_page_has_a_bound(stored: Stored) -> None:
    for limit in (0, -1, 201):
        with pytest.raises(InvalidArgument):
            search_wal(stored.pinned, WalQuery("rejection"), limit=limit)
