"""The digest of WAL rows: order and batch boundaries do not matter, every content column does."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import Malformed
from millrace.wal.digest import WalDigest, digest_rows, payload_hashes
from millrace.wal.schema import ROW_SCHEMA
from tests.node.wal_samples import message, rejection, wal_rows

ROWS = st.lists(
    st.builds(
        lambda entry, payload, rejected: {**(rejection if rejected else message)(entry), "payload": payload},
        st.integers(0, 1 << 40),
        st.none() | st.binary(max_size=40),
        st.booleans(),
    ),
    max_size=20,
)


@settings(max_examples=40)
@given(rows=ROWS, data=st.data())
def test_it_is_the_same_in_any_order_and_however_the_rows_are_cut(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    whole = digest_rows(wal_rows(rows))
    shuffled = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    assert digest_rows(wal_rows(shuffled[:cut])) + digest_rows(wal_rows(shuffled[cut:])) == whole
    assert digest_rows(wal_rows(rows).slice(cut)) == whole - digest_rows(wal_rows(rows).slice(0, cut))


@settings(max_examples=40)
@given(rows=ROWS.filter(bool), data=st.data())
def test_a_missing_a_doubled_and_an_altered_row_show(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    whole = digest_rows(wal_rows(rows))
    index = data.draw(st.integers(0, len(rows) - 1))
    assert digest_rows(wal_rows(rows[:index] + rows[index + 1 :])) != whole
    assert digest_rows(wal_rows([*rows, rows[index]])) != whole
    altered = [dict(row) for row in rows]
    altered[index]["payload"] = (altered[index]["payload"] or b"") + b"!"
    assert digest_rows(wal_rows(altered)) != whole


@pytest.mark.parametrize("column", [item.name for item in ROW_SCHEMA if item.name != "detail"])
def test_every_column_but_the_words_counts(column: str) -> None:
    row = {**message(7), "reason": "MALFORMED"}
    kind = ROW_SCHEMA.field(column).type
    other = {
        pa.large_binary(): b"other",
        pa.dictionary(pa.int32(), pa.utf8()): "OTHER",
    }.get(kind, 4242)
    assert digest_rows(wal_rows([{**row, column: other}])) != digest_rows(wal_rows([row]))
    assert digest_rows(wal_rows([{**row, "detail": "other words"}])) == digest_rows(wal_rows([row]))


def test_values_that_swap_rows_or_columns_show() -> None:
    one, two = message(1), message(2)
    swapped = [{**one, "payload": two["payload"]}, {**two, "payload": one["payload"]}]
    assert digest_rows(wal_rows(swapped)) != digest_rows(wal_rows([one, two]))
    assert digest_rows(wal_rows([{**one, "segment_id": 5, "partition_id": 6}])) != digest_rows(
        wal_rows([{**one, "segment_id": 6, "partition_id": 5}])
    )


def test_plain_strings_and_dictionaries_of_any_order_are_one_content() -> None:
    rows = pa.table(wal_rows([message(1), rejection(2), message(3)]))
    plain = rows.cast(
        pa.schema([item.with_type(pa.utf8()) if pa.types.is_dictionary(item.type) else item for item in rows.schema])
    )
    assert digest_rows(plain) == digest_rows(rows) == digest_rows(rows.slice(1)) + digest_rows(rows.slice(0, 1))


def test_its_value_is_fixed_for_ever_because_it_is_stored() -> None:
    assert str(digest_rows(wal_rows([message(1), rejection(2)]))) == "ebe00d3c95055d9a40d0af9275378cfe-2"


def test_it_reads_back_and_refuses_what_is_no_digest() -> None:
    value = digest_rows(wal_rows([message(1)]))
    assert WalDigest.parse(str(value)) == value
    for text in ("", "12-1", "z" * 32 + "-1", "0" * 32):
        with pytest.raises(Malformed):
            WalDigest.parse(text)


def test_payload_hashes_take_slices_nulls_and_plain_binary() -> None:
    values = [b"a", None, b"", b"abc" * 100]
    whole = payload_hashes(pa.array(values, pa.large_binary()))
    assert whole[1] == whole[2]
    assert np.array_equal(payload_hashes(pa.array(values, pa.binary())), whole)
    assert np.array_equal(payload_hashes(pa.array(values, pa.large_binary()).slice(1, 2)), whole[1:3])
    assert len(payload_hashes(pa.array([], pa.large_binary()))) == 0


def test_a_row_costs_less_than_a_few_microseconds() -> None:
    rows = wal_rows([message(entry, payload=b"x" * 1024) for entry in range(4000)])
    best = min(_seconds(rows) for _ in range(5))
    assert best / rows.num_rows < 5e-6, "about 0.4 µs where nothing else runs"


def _seconds(rows: pa.RecordBatch) -> float:
    start = time.process_time()
    digest_rows(rows)
    return time.process_time() - start
