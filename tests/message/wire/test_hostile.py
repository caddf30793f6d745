"""Hostile entries: each becomes one UNDEFINED row that says why, beside its undisturbed neighbours."""

from __future__ import annotations

import struct
import time

import crc32c
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import UnsupportedVersion
from millrace.message.model import MutableMessage
from millrace.message.wire.decode import (
    NO_MAGIC,
    TOO_SHORT,
    UNKNOWN_TAG,
    WRONG_COLUMNS,
    WRONG_COUNT,
    WRONG_SECTIONS,
    WRONG_STAMP,
    WRONG_VERSION,
    decode_entries,
)
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.framing import FramingFault, check_framing
from millrace.message.wire.layout import ABSENT, ARRAY, COLUMNS, COLUMNS_START, CONSTANT, RAMP
from tests.message.samples import entries, messages, runs

GOOD = MutableMessage(type=1200, vchannel="pc0_7v0", sequence=5)


def sealed(value: bytes) -> bytes:
    """`value` with a right magic and checksum."""
    return b"MLRW" + struct.pack("<I", crc32c.crc32c(value[8:])) + value[8:]


def entry(
    *,
    version: int = 1,
    flags: int = 0,
    reserved: int = 0,
    stamp: bytes = b"",
    count: int = 1,
    columns: dict[str, tuple[int, bytes]] | None = None,
    dictionary: bytes = b"\x01\x00\x00\x00",
    body: bytes = b"",
) -> bytes:
    """An entry of these parts with a right checksum, whatever it means. By default one TimeTick."""
    given = {"type": (CONSTANT, struct.pack("<H", 1200))} | (columns or {})
    tags = bytes(given.get(column.name, (ABSENT, b""))[0] for column in COLUMNS)
    data = b"".join(given.get(column.name, (ABSENT, b""))[1] for column in COLUMNS)
    head = struct.pack("<BBHIIII", version, flags, reserved or len(stamp), count, len(data), len(dictionary), len(body))
    return sealed(b"\0" * 8 + head + tags + data + dictionary + body + stamp)


def undefined(value: bytes) -> str:
    """The detail of the one row that `value` becomes, between two good entries that stay what they are."""
    good = encode_entry([GOOD])
    found = decode_entries(entries([good, value, good]))
    found.validate(full=True)
    first, row, last = found.to_pylist()
    assert (first["type"], first["sequence"], last["type"], last["sequence"]) == (1200, 5, 1200, 5)
    assert (row["entry"], row["index"], row["type"], row["vchannel"], row["sequence"]) == (1, 0, 0, "", 0)
    assert row["payload"] == value[: 64 << 10]
    assert found.column("detail").null_count == 2
    return str(row["detail"])


def test_the_parts_make_a_right_entry_where_nothing_is_wrong() -> None:
    assert entry() == encode_entry([MutableMessage(type=1200)])


@given(runs(), st.data())
def test_an_entry_with_any_byte_changed_is_undefined(run: list[MutableMessage], data: st.DataObject) -> None:
    value = bytearray(encode_entry(run))
    place = data.draw(st.integers(0, len(value) - 1))
    value[place] ^= data.draw(st.integers(1, 255))
    assert undefined(bytes(value))


@given(messages(), st.data())
def test_an_entry_cut_short_or_with_bytes_behind_is_undefined(message: MutableMessage, data: st.DataObject) -> None:
    value = encode_entry([message])
    assert undefined(value[: data.draw(st.integers(0, len(value) - 1))])
    assert undefined(value + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_random_bytes_are_undefined_row_by_row(values: list[bytes]) -> None:
    found = decode_entries(entries(values))
    assert found.column("type").to_pylist() == [0] * len(values)
    assert found.column("payload").to_pylist() == values


@settings(max_examples=60)
@given(st.lists(runs(), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_changed_bytes_under_a_right_checksum_never_raise_and_never_disturb_others(
    framed: list[list[MutableMessage]], random: object
) -> None:
    values = [encode_entry(run) for run in framed]
    changed = []
    for value in values:
        for _ in range(4):
            draft = bytearray(value)
            for _ in range(random.randint(1, 3)):  # type: ignore[attr-defined]
                place = random.randrange(9, len(draft))  # type: ignore[attr-defined]
                draft[place] = random.choice([0, 1, 2, 3, 0x7F, 0x80, 0xFF, random.randrange(256)])  # type: ignore[attr-defined]
            changed += [sealed(bytes(draft)), value]
    together = decode_entries(entries(changed))
    together.validate(full=True)
    names = ["entry", "physical_ms", "vchannel", "principal"]
    alone = [decode_entries(entries([value])) for value in changed]
    expected = pa.Table.from_batches([each.drop_columns(names) for each in alone]).combine_chunks()
    assert pa.Table.from_batches([together.drop_columns(names)]).equals(expected)
    for name in ("vchannel", "principal"):
        assert together[name].to_pylist() == [value for each in alone for value in each[name].to_pylist()]
    assert together.num_rows <= sum(map(len, changed)) // 16 + len(changed)


ONE = (CONSTANT, struct.pack("<q", 1))
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter"),
    "other magic": (b"MLRV" + entry()[4:], "magic"),
    "checksum": (entry()[:-1] + b"\x01", "checksum"),
    "version 0": (entry(version=0), "version"),
    "flags": (entry(flags=1), "flags"),
    "reserved": (entry(reserved=1), "reserved"),
    "a stamp of no bytes": (entry(version=2), "stamp"),
    "a stamp of 256 bytes": (entry(version=2, stamp=b"x" * 256), "stamp"),
    "a stamp that is not UTF-8": (entry(version=2, stamp=b"\xff"), "stamp"),
    "unknown flags of a stamp": (entry(version=2, flags=2, stamp=b"a"), "stamp"),
    "a stamp beyond the entry": (entry(version=2, reserved=2, stamp=b"a"), "sections"),
    "bytes behind the stamp": (sealed(entry(version=2, stamp=b"a") + b"x"), "sections"),
    "no messages": (entry(count=0), "count"),
    "too many messages for its length": (entry(count=65536), "count"),
    "more than 65,536 messages": (entry(count=65537, body=b"x" * (65537 * 16)), "count"),
    "unknown tag": (entry(columns={"term": (4, b"")}), "tag"),
    "column cut short": (entry(columns={"term": (CONSTANT, b"\x01")}), "header columns"),
    "bytes behind the columns": (entry(columns={"payload_length": (ABSENT, b"\0")}), "header columns"),
    "sections beyond the entry": (sealed(entry()[:24] + b"\xff\xff\xff\xff" + entry()[28:]), "sections"),
    "bytes behind the body": (sealed(entry() + b"x"), "sections"),
    "no names": (entry(dictionary=b"\0\0"), "dictionary"),
    "no dictionary": (entry(dictionary=b""), "dictionary"),
    "name cut short": (entry(dictionary=b"\x01\x00\x05\x00ab"), "dictionary"),
    "name of 256 bytes": (entry(dictionary=b"\x01\x00\x00\x01" + b"x" * 256), "dictionary"),
    "name twice": (entry(dictionary=b"\x02\x00\x01\x00a\x01\x00a"), "dictionary"),
    "name not UTF-8": (entry(dictionary=b"\x01\x00\x01\x00\xff"), "UTF-8"),
    "bytes behind the names": (entry(dictionary=b"\x01\x00\x00\x00\x00"), "dictionary"),
    "VChannel outside the dictionary": (entry(columns={"vchannel": (CONSTANT, b"\x01\x00")}), "VChannel index"),
    "type 0": (entry(columns={"type": (ABSENT, b"")}), "type 0"),
    "payload lengths below the body": (entry(body=b"xyz"), "payload lengths"),
    "payload lengths above the body": (
        entry(columns={"payload_length": (CONSTANT, b"\x04\0\0\0")}, body=b"xyz"),
        "payload lengths",
    ),
    **{
        f"negative {column.name}": (entry(columns={column.name: (CONSTANT, b"\xff" * column.width)}), column.name)
        for column in COLUMNS[2:12]
    },
    "ramp over the width": (
        entry(count=2, columns={"epoch": (RAMP, struct.pack("<i", (1 << 31) - 1))}),
        "epoch",
    ),
    "ramp over 63 bits": (entry(count=2, columns={"sequence": (RAMP, struct.pack("<q", (1 << 63) - 1))}), "sequence"),
    "ramp from below 0": (entry(count=2, columns={"sequence": (RAMP, struct.pack("<q", -1))}), "sequence"),
    "one negative of several": (entry(count=2, columns={"rows": (ARRAY, struct.pack("<2q", 1, -1))}), "rows"),
    "a long one": (b"x" * 100_000, "magic"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_defect_is_named_in_the_detail(name: str) -> None:
    value, words = WRONG[name]
    assert words in undefined(value)


def test_a_later_version_is_an_error_only_where_the_entry_is_whole() -> None:
    later = entry(version=3)
    with pytest.raises(UnsupportedVersion, match="0:1 has wire form 3"):
        decode_entries(entries([entry(), later]))
    assert "checksum" in undefined(later[:-1] + b"\x01")


def test_few_bytes_never_become_many_rows() -> None:
    dense = entry(count=65536, columns={"term": ONE})
    run = entries([dense] * 20_000)
    before = pa.total_allocated_bytes()
    started = time.process_time()
    found = decode_entries(run)
    assert found.num_rows == 20_000
    assert pa.total_allocated_bytes() - before < 16 * run.nbytes
    assert time.process_time() - started < 5


def test_the_densest_entry_stays_within_the_stated_bound() -> None:
    count = 1000
    fixed = COLUMNS_START + 2 + 4
    dense = entry(
        count=count, body=b"x" * (count * 16 - fixed - 4), columns={"payload_length": (CONSTANT, b"\0\0\0\0")}
    )
    assert "count" not in undefined(dense)  # dense enough; what is wrong is the sum of its payload lengths
    ticks = encode_entry([MutableMessage(type=1200)] * 65536)
    assert len(ticks) >= 16 * 65536
    found = decode_entries(entries([ticks]))
    assert found.nbytes < 16 * len(ticks)


def test_many_entries_with_a_dictionary_of_their_own_each_share_one_index() -> None:
    values = [encode_entry([MutableMessage(type=400, vchannel=f"pc0_{place % 50}v0")]) for place in range(2000)]
    column = decode_entries(entries(values)).column("vchannel")
    assert len(column.dictionary) == 50
    assert column.to_pylist() == [f"pc0_{place % 50}v0" for place in range(2000)]


FRAMING = {TOO_SHORT, NO_MAGIC, WRONG_VERSION, WRONG_STAMP, WRONG_COUNT, WRONG_SECTIONS, UNKNOWN_TAG, WRONG_COLUMNS}


@pytest.mark.parametrize("name", WRONG)
def test_the_framing_says_of_a_header_what_the_decoder_says_and_nothing_of_the_rest(name: str) -> None:
    value, _ = WRONG[name]
    (row,) = decode_entries(entries([value])).to_pylist()
    for others in ([], [encode_entry([GOOD])]):
        run = pa.array([*others, value, *others], pa.large_binary())
        for cut in (run, pa.concat_arrays([pa.array([b"before"], pa.large_binary()), run]).slice(1)):
            refused = check_framing(cut)
            if row["detail"] in FRAMING and name != "a stamp that is not UTF-8":
                assert refused == FramingFault(len(others), row["detail"], 1)
            else:
                assert refused is None


@given(st.lists(messages(), min_size=1, max_size=4), st.data())
def test_what_is_encoded_passes_and_what_is_refused_does_not_decode(
    run: list[MutableMessage], data: st.DataObject
) -> None:
    value = encode_entry(run)
    assert check_framing(pa.array([value, value], pa.large_binary())) is None
    draft = bytearray(value)
    for _ in range(data.draw(st.integers(1, 3))):
        draft[data.draw(st.integers(0, min(len(draft) - 1, 40)))] = data.draw(st.integers(0, 255))
    changed = sealed(bytes(draft)) if draft[:4] == b"MLRW" else bytes(draft)
    alone = check_framing(pa.array([changed], pa.large_binary()))
    among = check_framing(pa.array([value, changed, None, changed], pa.large_binary()))
    assert among is not None
    if alone is None:
        assert (among.index, among.count) == (2, 1)
        return
    assert (among.index, among.cause, among.count) == (1, alone.cause, 3)
    try:
        decoded = decode_entries(entries([changed]))
    except UnsupportedVersion:
        assert alone.is_newer_version
    else:
        assert decoded.column("type").to_pylist() == [0]
        assert decoded.column("detail").to_pylist() == [alone.cause]
