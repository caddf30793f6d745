"""Imports through the append host and scans: decided as any exclusive message, delivered as the message they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.base.errors import AppendRejected
from millrace.base.settings import Settings
from millrace.client.consume.scan import scan
from millrace.commands.parts.message_json import payload_decoder, unit_json
from millrace.log.rocksmq.service import RocksMQ
from millrace.message import builders
from millrace.message.bodies import ImportFile
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType
from millrace.message.wire.encode import encode_entry
from millrace.node.append.host import AppendHost
from millrace.rpc.outcome import AppendResult
from millrace.wal.chain import CHAIN_VERSION
from millrace.wal.scanner import All, ImmutableTxn, TypeFilter
from millrace.wal.state import ChannelState
from tests.node.append.samples import PCHANNEL, commit_wal, insert, keys_of, open_log, opening, transaction

V0, V1 = "p0_1v0", "p0_1v1"
FILE: ImportFile = {"path": "load/0.parquet", "partition_id": 1, "rows": 3, "bytes": 900, "digest": "0a" * 32}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RocksMQ]:
    with open_log(tmp_path / "log", PCHANNEL) as opened:
        yield opened


@pytest.fixture
def host(service: RocksMQ) -> Iterator[AppendHost]:
    """In term 2, for the samples' term 1 runs the chain's first version."""
    with AppendHost(service, ChannelState.new) as opened:
        opened.append(PCHANNEL, opening()).results()
        yield opened


def load(*files: ImportFile, term: int = 2, replace: bool = False, **stamps: int) -> MutableMessage:
    return builders.import_files(
        "load", files, vchannel=V0, collection_id=1, term=term, replace=replace, **stamps  # type: ignore[arg-type]
    )  # fmt: skip


def newest_term(host: AppendHost) -> None:
    opened = builders.term_opening(term=2, chain_version=CHAIN_VERSION, config={})
    host.append(PCHANNEL, encode_entry([opened])).results()


def append(host: AppendHost, message: MutableMessage) -> AppendResult:
    return host.append(PCHANNEL, encode_entry([message])).result()


def test_an_import_is_acknowledged_once_and_fails_what_is_open(host: AppendHost) -> None:
    newest_term(host)
    begin, body, commit = (replace(message, term=2) for message in transaction(5, keys_of(V0, 1), vchannel=V0))
    host.append(PCHANNEL, encode_entry([begin, body])).results()
    first = append(host, load(FILE, producer_id=7, sequence=0))
    again = append(host, load(FILE, producer_id=7, sequence=0))
    assert again.duplicate
    assert (again.message_id, again.time_tick) == (first.message_id, first.time_tick)
    with pytest.raises(AppendRejected) as caught:
        append(host, commit)
    assert caught.value.reason == "TXN_NOT_ACTIVE"


def test_a_term_that_runs_an_earlier_chain_knows_no_import(host: AppendHost) -> None:
    with pytest.raises(AppendRejected) as caught:
        append(host, load(FILE, term=1))
    assert caught.value.reason == "UNSUPPORTED_TYPE"
    newest_term(host)
    append(host, load(FILE))


@pytest.mark.parametrize("path", ["../wal/x.parquet", "/etc/passwd", "a/../../x"])
def test_a_client_cannot_name_a_file_outside_the_staged_folder(host: AppendHost, path: str) -> None:
    newest_term(host)
    forged = load(FILE).payload.replace(FILE["path"].encode(), path.encode())
    with pytest.raises(AppendRejected) as caught:
        append(host, replace(load(FILE), payload=forged))
    assert caught.value.reason == "MALFORMED"


def test_what_does_not_belong_together_is_rejected(host: AppendHost) -> None:
    newest_term(host)
    unknown: ImportFile = {**FILE, "partition_id": 2}
    for message, reason in [
        (load(unknown), "PARTITION_NOT_FOUND"),
        (replace(load(FILE), collection_id=2), "COLLECTION_NOT_FOUND"),
        (replace(load(FILE), schema_version=2), "SCHEMA_MISMATCH"),
        (replace(load(FILE), rows=4), "MALFORMED"),
        (replace(load(FILE), txn_id=5), "MALFORMED"),
    ]:
        with pytest.raises(AppendRejected) as caught:
            append(host, message)
        assert caught.value.reason == reason


@pytest.mark.parametrize("in_table", [False, True])
def test_a_scan_delivers_the_import_itself(host: AppendHost, service: RocksMQ, tmp_path: Path, in_table: bool) -> None:
    newest_term(host)
    append(host, replace(insert(keys_of(V0, 1)[0]), term=2))
    result = append(host, load(FILE, replace=True))
    wal = tmp_path / "wal"
    if in_table:
        commit_wal(service, wal)
    until = host.tick(PCHANNEL)
    units = list(scan(PCHANNEL, All(), wal=wal, tail=host, until_tick=until))
    types = [MessageType(unit.type).name for unit in units if not isinstance(unit, ImmutableTxn)]
    around = types.index("IMPORT")
    assert types[around - 2 : around + 2] == ["FLUSH", "CREATE_SEGMENT", "IMPORT", "FLUSH"]
    filters = [TypeFilter({MessageType.IMPORT})]
    [unit] = scan(PCHANNEL, All(), wal=wal, tail=host, filters=filters, until_tick=until)
    assert not isinstance(unit, ImmutableTxn)
    assert (unit.id, unit.time_tick, unit.rows) == (result.message_id, result.time_tick, 3)
    shown = unit_json(unit, payload_decoder(Settings(data_dir=tmp_path)))
    assert (shown["type"], shown["rows"]) == ("IMPORT", 3)
    assert json.loads(json.dumps(shown))["payload"] == {"import_id": "load", "files": [FILE], "replace": True}
