"""A streaming node that dies at each place on the way of a range into the table, and the one that comes after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from millrace.base.errors import InvalidSettings
from millrace.base.failpoint import parse
from millrace.log.rocksmq.service import RocksMQ
from millrace.message.builders import create_collection
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.message.wire.encode import encode_entry
from millrace.tables.wal.table import WalTable
from millrace.wal.digest import digest_rows
from tests.crash.commit_once import commit_once
from tests.failpoints import die_at
from tests.node.log_samples import TERM, accepted, opening, rejected, tick

PCHANNELS = ("p0", "p1")


def append(log: Path, *entries: bytes) -> int:
    """Append `entries` to every PChannel; how many that were."""
    with RocksMQ(log) as service:
        for name in PCHANNELS:
            if name not in service.names():
                service.create(name)
            service.open(name).append(entries)
    return len(entries) * len(PCHANNELS)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "place, stands",
    [
        ("range.written", False),
        ("range.written@2", False),
        ("commit.checked", False),
        ("commit.done", True),
        ("checkpoint.written", True),
        ("trim.removed", True),
        ("trim.removed@2", True),
    ],
)
def test_every_row_is_there_once_wherever_the_node_died(tmp_path: Path, place: str, stands: bool) -> None:
    log, wal = tmp_path / "log", tmp_path / "wal"
    rows = append(log, opening(), accepted(), rejected(b"x"))
    assert commit_once(log, wal) == rows
    added = append(log, accepted(), rejected(b"y"), tick())
    rows += added
    die_at(place, "tests.crash.commit_once", log, wal)
    assert commit_once(log, wal) == (0 if stands else added)
    rows += append(log, accepted())
    assert commit_once(log, wal) == len(PCHANNELS)
    table = WalTable.open(wal)
    content = DeltaTable(str(wal)).to_pyarrow_table(filters=[("kind", "!=", "state")])
    ids = set(zip(*(content.column(name).to_pylist() for name in ("pchannel", "entry", "ordinal")), strict=True))
    assert content.num_rows == len(ids) == rows
    totals = [table.position(name).totals for name in PCHANNELS]
    assert digest_rows(content) == totals[0].digest + totals[1].digest


@pytest.mark.slow
def test_a_node_that_never_died_made_the_same_rows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    append(log, opening(), accepted(), rejected(b"x"))
    commit_once(log, tmp_path / "died" / "wal")
    append(log, accepted(), tick(), accepted())
    die_at("commit.checked", "tests.crash.commit_once", log, tmp_path / "died" / "wal")
    commit_once(log, tmp_path / "died" / "wal")
    commit_once(log, tmp_path / "lived" / "wal")
    died, lived = (WalTable.open(tmp_path / name / "wal") for name in ("died", "lived"))
    for name in PCHANNELS:
        assert died.position(name).totals == lived.position(name).totals
        assert died.position(name).state_bytes == lived.position(name).state_bytes


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("place", ["commit.done", "range.written", "commit.checked", "checkpoint.written"])
def test_increments_of_the_state_go_on_wherever_the_node_died(tmp_path: Path, place: str) -> None:
    log, died, lived = tmp_path / "log", tmp_path / "died" / "wal", tmp_path / "lived" / "wal"
    append(log, opening())
    with RocksMQ(log) as service:
        for name in PCHANNELS:
            service.open(name).append([encode_entry([collection(name, number)]) for number in range(1, 41)])
    commit_once(log, died)
    for _ in range(2):
        append(log, accepted(), tick())
        die_at(place, "tests.crash.commit_once", log, died)
        commit_once(log, died)
        append(log, accepted())
        commit_once(log, died)
    commit_once(log, lived)
    for name in PCHANNELS:
        one, other = WalTable.open(died).position(name), WalTable.open(lived).position(name)
        assert len(one.rows) > 1, "there are increments"
        assert (one.state_bytes, one.totals) == (other.state_bytes, other.totals)


def collection(pchannel: str, number: int) -> MutableMessage:
    """A collection of one VChannel: with some of them the state is too large to be stored whole each time."""
    name = f"{pchannel}_{number}v0"
    schema = CollectionSchema((FieldSpec("id", "int64", False),), "id")
    return create_collection(
        f"c{number}", schema, vchannel=name, vchannels=[name], collection_id=number, partitions={"all": 1}, term=TERM
    )


def test_failpoints_are_named_with_the_visit_that_kills() -> None:
    assert parse("") == {}
    assert parse("a,b@3") == {"a": 1, "b": 3}
    for text in ("@2", "a@0", "a@x"):
        with pytest.raises(InvalidSettings):
            parse(text)
