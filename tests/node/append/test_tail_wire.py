"""The wire form of a tail: batches are merged, converted back unchanged, and made once for all readers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.client.append_client import AppendClient
from millrace.log.server.flight import LogServer
from millrace.message.wire.encode import encode_entry
from millrace.node.append import server as serving
from millrace.node.append.host import AppendHost
from millrace.node.append.server import AppendExtension, merged_wire_rows
from millrace.rpc.remote_log import RemoteLogService
from millrace.rpc.tail import TAIL_SCHEMA, TailBatch, from_wire_rows, to_wire_rows
from millrace.wal.schema import ROW_SCHEMA
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, VCHANNELS, insert, judged, keys_of, open_log, opening, transaction

TOKEN = "a-token-of-the-reader"


@pytest.fixture
def messages(tmp_path: Path) -> pa.RecordBatch:
    ours, theirs = keys_of(VCHANNELS[0], 5), keys_of(VCHANNELS[1], 5)
    appended = [[insert(ours[0])], [insert(theirs[0])], transaction(5, ours[1:4], vchannel=VCHANNELS[0])]
    with open_log(tmp_path / "log", PCHANNEL) as service:
        service.open(PCHANNEL).append([*opening(), *map(encode_entry, appended)])
        return judged(service).messages


def redone(rows: pa.RecordBatch) -> pa.RecordBatch:
    """`rows` with dictionaries of their own, as each run of the chain makes them."""
    return from_wire_rows(to_wire_rows(rows))


def test_batches_whose_dictionaries_differ_are_one_on_the_wire(messages: pa.RecordBatch) -> None:
    parts = [redone(messages.slice(place, 1)) for place in range(messages.num_rows)]
    (wire,) = merged_wire_rows(parts)
    assert wire.schema.equals(TAIL_SCHEMA)
    back = from_wire_rows(wire)
    assert back.schema.equals(ROW_SCHEMA)
    assert back.to_pylist() == messages.to_pylist()
    assert merged_wire_rows([]) == []


def test_some_columns_have_a_wire_form_too(messages: pa.RecordBatch) -> None:
    some = messages.select(["type", "time_tick"])
    assert from_wire_rows(to_wire_rows(some)).to_pylist() == some.to_pylist()


def test_a_message_is_encoded_once_for_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(batches: Sequence[pa.RecordBatch]) -> Any:
        made.append(len(batches))
        return merged_wire_rows(batches)

    monkeypatch.setattr(serving, "merged_wire_rows", counted)
    with (
        open_log(tmp_path / "log", PCHANNEL) as service,
        AppendHost(service, ChannelState.new) as host,
    ):
        host.append(PCHANNEL, opening()).results()
        server = LogServer(service, tokens=[TOKEN], extensions=[AppendExtension(host)])
        clients = [AppendClient(RemoteLogService.at(server.address, token=TOKEN)) for _ in range(3)]
        try:
            for key in keys_of(VCHANNELS[0], 3):
                before = host.tick(PCHANNEL)
                host.append(PCHANNEL, encode_entry([insert(key)])).results()
                found = [client.tail(PCHANNEL, before, timeout=5.0) for client in clients]
                assert all(isinstance(each, TailBatch) for each in found)
                rows = [[batch.to_pylist() for batch in each.batches] for each in found if isinstance(each, TailBatch)]
                assert rows[0] == rows[1] == rows[2] != []
        finally:
            for client in clients:
                client.close()
            server.close()
    assert len(made) <= 6, "once for each message, and once if it was read before the next tick"
