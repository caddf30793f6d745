"""Which types of fields a chain takes is a matter of the version that its term runs."""

from __future__ import annotations

import pytest

from millrace.message import builders
from millrace.message.field_types import TYPES_BEFORE_V4
from millrace.message.ids import LogId
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.wire.encode import encode_entry
from millrace.wal.versions import CHAIN_VERSIONS, VERSION_4
from tests.laws.parts import Row
from tests.laws.real import run
from tests.laws.scribe import PCHANNEL, START_MS, Written

HERE = f"{PCHANNEL}_1v0"
KEY = FieldSpec("id", "int64", False)
NEW = ("decimal(10,2)", "timestamp_ntz", "uuid", "json", "list<list<int8>>", "map<string, int8>", "struct<a: int8>")


def judged(version: int, *messages: object) -> list[Row]:
    opening = builders.term_opening(term=1, chain_version=version, config={})
    entry = encode_entry([opening, *messages])  # type: ignore[list-item]
    return run(Written(entries=[(LogId(0, 1), START_MS, entry)])).rows[1:]


def create(*fields: FieldSpec) -> object:
    return builders.create_collection(
        "c",
        CollectionSchema((KEY, *fields), "id"),
        vchannel=HERE,
        vchannels=[HERE],
        collection_id=1,
        partitions={"p": 1},
        term=1,
    )


def add(kind: str) -> object:
    return builders.schema_change(
        [AddField(FieldSpec("x", kind, True))], vchannel=HERE, collection_id=1, schema_version=2, term=1
    )


@pytest.mark.parametrize("version", CHAIN_VERSIONS)
def test_a_type_that_a_version_does_not_know_is_no_body_there(version: int) -> None:
    for kind in NEW:
        (created,) = judged(version, create(FieldSpec("x", kind, True)))
        _, added = judged(version, create(), add(kind))
        wanted = None if version >= VERSION_4 else "MALFORMED"
        assert (created["reason"], added["reason"]) == (wanted, wanted)
        if wanted:
            assert created["detail"] == f"field 'x': unknown type {kind!r}; one of {', '.join(TYPES_BEFORE_V4)}"


@pytest.mark.slow
def test_the_types_of_the_first_versions_are_taken_by_all() -> None:
    for version in CHAIN_VERSIONS:
        (created,) = judged(
            version, create(*(FieldSpec(f"f{n}", kind, True) for n, kind in enumerate(TYPES_BEFORE_V4)))
        )
        assert created["reason"] is None
