"""A damaged state row is never taken for another state.

A checksum, or the log for rows of earlier builds, and a way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millrace.base.errors import StateDamaged, UnsupportedVersion
from millrace.commands.verify import check_channels
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.node.append.server import committed_state_loader
from millrace.node.ingest.definition import ingest_to_end
from millrace.node.range_loop.parking import parked_names, unpark
from millrace.operations.recovery.diagnose import diagnose
from millrace.operations.recovery.wal_repair import rebuild_state
from millrace.runtime.progress import Progress
from millrace.tables.wal.state_check import check_state
from millrace.tables.wal.table import WalTable
from millrace.wal.state import ChannelState
from tests.operations.log_maker import Things

P = "p0"


@pytest.fixture
def things(tmp_path: Path) -> Iterator[Things]:
    """Rows of an idempotent producer on both PChannels, in two commits."""
    made = Things(tmp_path)
    for number in range(2):
        made.fill(1, size=10)
        for vchannel in made.collection.vchannels:
            made.collection.append(vchannel, resent(made, vchannel, number))
        made.maker.commit()
    yield made
    made.close()


def resent(things: Things, vchannel: str, sequence: int) -> Any:
    """The producer's message number `sequence`, the same whenever it is sent."""
    (key,) = things.collection.keys_of(vchannel, 100 + sequence)[-1:]
    message = things.collection.insert({"id": [key], "body": ["once"]}, vchannel=vchannel)
    return replace(message, producer_id=5, epoch=1, sequence=sequence)


def state_file(things: Things) -> Path:
    table = WalTable.open(things.settings.wal_uri)
    return Path(table.uri) / table.position(P).rows[-1].path


def harm(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a state row anew, changed."""
    table = pq.ParquetFile(path).read()
    (row,) = table.to_pylist()
    change(row)
    pq.write_table(pa.Table.from_pylist([row], schema=table.schema), path)


def without_checksum(row: dict[str, Any]) -> None:
    """As earlier builds wrote it."""
    detail = json.loads(row["detail"])
    del detail["crc32c"]
    row["detail"] = json.dumps(detail)


def turned_back(row: dict[str, Any]) -> None:
    """The producer's next sequence is one less: without a checksum it decodes to another state."""
    state = ChannelState.from_bytes(row["payload"])
    (channel,) = state.vchannels.values()
    producer = channel.producers[5]
    turned = producer._replace(next_sequence=1, results=producer.results[:0])
    state.put(channel._replace(producers=channel.producers.set(5, turned)))
    row["payload"] = state.to_bytes()


def flipped(place: int, bit: int) -> Callable[[dict[str, Any]], None]:
    def change(row: dict[str, Any]) -> None:
        data = bytearray(row["payload"])
        data[place % len(data)] ^= 1 << bit
        row["payload"] = bytes(data)

    return change


@pytest.mark.slow
def test_no_flipped_bit_of_a_state_decodes_to_another_state(things: Things) -> None:
    path, delta = state_file(things), WalTable.open(things.settings.wal_uri)
    sound, size = path.read_bytes(), len(delta.position(P).state_bytes or b"")
    for place in range(0, size, 3):
        harm(path, flipped(place, place % 8))
        with pytest.raises((StateDamaged, UnsupportedVersion)):
            _ = WalTable(delta.table).position(P).state
        path.write_bytes(sound)
    for change in (
        lambda row: row.update(time_tick=row["time_tick"] + 1),
        lambda row: row.update(detail=row["detail"].replace('"messages":', '"messages":1')),
    ):
        harm(path, change)
        with pytest.raises(StateDamaged):
            WalTable.open(things.settings.wal_uri).position(P)
        path.write_bytes(sound)
    assert WalTable.open(things.settings.wal_uri).position(P).has_checksum


@pytest.mark.slow
def test_an_older_row_without_a_checksum_is_held_against_the_log(things: Things) -> None:
    path = state_file(things)
    harm(path, without_checksum)
    sound, log = path.read_bytes(), things.log.open(P)
    table = WalTable.open(things.settings.wal_uri)
    assert not table.position(P).has_checksum
    check_state(table, log, P)
    decoded = 0
    for place in range(0, len(table.position(P).state_bytes or b""), 5):
        harm(path, flipped(place, place % 7))
        try:
            damaged = WalTable(table.table)
            _ = damaged.position(P).state
        except (StateDamaged, UnsupportedVersion):
            pass
        else:
            decoded += 1
            with pytest.raises(StateDamaged):
                check_state(damaged, log, P)
        path.write_bytes(sound)
    assert decoded > 20, "many flips decode to another state"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("old", [False, True])
def test_the_node_parks_the_channel_and_goes_on_with_the_others_until_recovery_has_made_it_anew(
    things: Things, old: bool
) -> None:
    if old:
        harm(state_file(things), without_checksum)
    harm(state_file(things), turned_back)
    before = WalTable.open(things.settings.wal_uri).last_tick("p1")
    for vchannel in things.collection.vchannels:
        things.collection.append(vchannel, resent(things, vchannel, 1))
        things.collection.append(vchannel, resent(things, vchannel, 2))
    ingest_to_end(things.settings, things.log)
    assert parked_names(things.settings.parked_path) == {P}
    assert WalTable.open(things.settings.wal_uri).last_tick("p1") > before

    found = diagnose(things.settings, things.log, depth="full", stale_after=60, progress=Progress())
    assert ("wal_state_damaged", P) in {(each.kind, each.subject) for each in found}
    rebuild_state(things.settings, things.log, P)
    unpark(things.settings.parked_path, P)
    ingest_to_end(things.settings, things.log)
    wal = WalTable.open(things.settings.wal_uri).table.delta
    reasons = wal.to_pyarrow_table(columns=["pchannel", "reason"], filters=[("kind", "=", "rejection")]).to_pylist()
    assert sorted((row["pchannel"], row["reason"]) for row in reasons) == [("p0", "DUPLICATE"), ("p1", "DUPLICATE")]
    assert all(each["holds"] for each in check_channels(things.settings, log=things.log))


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
def test_the_append_host_follows_from_an_older_state_and_a_resend_has_no_second_effect(
    things: Things, old: bool
) -> None:
    if old:
        harm(state_file(things), without_checksum)
    harm(state_file(things), turned_back)
    (vchannel,) = [name for name in things.collection.vchannels if name.startswith(P)]
    with AppendHost(things.log, committed_state_loader(Path(things.settings.wal_uri), things.log)) as host:
        again = host.append(P, [encode_entry([resent(things, vchannel, 1)])], deadline=20.0).result()
        following = host.append(P, [encode_entry([resent(things, vchannel, 2)])], deadline=20.0).result()
    assert (again.duplicate, following.duplicate) == (True, False)


@pytest.mark.slow
def test_verify_compares_the_state_with_what_the_log_gives(things: Things) -> None:
    def change(row: dict[str, Any]) -> None:
        without_checksum(row)
        turned_back(row)

    assert all(each["holds"] for each in check_channels(things.settings, log=things.log))
    harm(state_file(things), change)
    found = {each["pchannel"]: each for each in check_channels(things.settings, log=things.log)}
    assert (found["p0"]["holds"], found["p1"]["holds"]) == (False, True)
    assert "another channel state" in found["p0"]["detail"]
