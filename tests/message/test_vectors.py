"""The published test vectors, read as another client would read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.base.errors import EntryTooLarge
from millrace.message.keys import KEY_HASH_VERSION, key_column, key_hash, vchannel_index
from millrace.message.model import MutableMessage
from millrace.message.payload.rows import decode_rows
from millrace.message.schema import CollectionSchema
from millrace.message.wire.decode import decode_entries
from millrace.message.wire.encode import encode_entry
from millrace.rpc.wire import NotAccepted, ack_from_bytes
from tests.message import vectors
from tests.message.samples import entries

FILE = Path(__file__).parents[2] / "docs" / "wire-form-vectors.json"


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return value


def test_the_file_is_what_its_command_writes() -> None:
    assert FILE.read_text(encoding="utf-8") == vectors.text()


def test_each_entry_decodes_to_its_messages_and_is_written_so(published: dict[str, Any]) -> None:
    for vector in published["entries"]:
        messages = [
            MutableMessage(**message | {"payload": bytes.fromhex(message["payload"])}) for message in vector["messages"]
        ]
        assert encode_entry(messages).hex() == vector["hex"], vector["name"]
        assert vectors.decoded(bytes.fromhex(vector["hex"])) == vector["messages"], vector["name"]


def test_each_stamped_entry_names_its_principal(published: dict[str, Any]) -> None:
    asserted, checked = published["stamped"]
    for vector, prefix in ((asserted, "asserted:"), (checked, "")):
        value = bytes.fromhex(vector["hex"])
        assert vectors.decoded(value) == vector["messages"], vector["name"]
        assert decode_entries(entries([value])).column("principal").to_pylist() == [prefix + vector["principal"]]


def test_each_malformed_entry_is_undefined(published: dict[str, Any]) -> None:
    values = [bytes.fromhex(vector["hex"]) for vector in published["malformed"]]
    found = decode_entries(entries(values))
    assert found.column("type").to_pylist() == [0] * len(values)
    assert len(values) > 30


def test_each_payload_holds_its_rows(published: dict[str, Any]) -> None:
    for vector in published["payloads"]:
        schema = CollectionSchema.from_json(vector["schema"])
        assert decode_rows(bytes.fromhex(vector["hex"]), schema.arrow()).to_pylist() == vector["rows"]


def test_each_key_has_its_hash(published: dict[str, Any]) -> None:
    assert published["key_hash_version"] == KEY_HASH_VERSION
    for vector in published["keys"]:
        assert f"{key_hash(vector['key']):016x}" == vector["hash"]
        assert vchannel_index(pa.array([vector["key"]]), 7).tolist() == [vector["index_of_7"]]


def test_each_encoded_key_has_its_bytes_and_hash(published: dict[str, Any]) -> None:
    assert len(published["encoded_keys"]) == len(vectors.ENCODED)
    for vector in published["encoded_keys"]:
        names = [f"k{place}" for place in range(len(vector["key"]))]
        found = key_column(vectors.key_of(dict(zip(names, vector["types"], strict=True)), vector["key"]), names)
        assert found.to_pylist() == [bytes.fromhex(vector["hex"])]
        assert f"{key_hash(found[0].as_py()):016x}" == vector["hash"]
        assert vchannel_index(found, 7).tolist() == [vector["index_of_7"]]


def test_each_failed_append_says_what_it_is(published: dict[str, Any]) -> None:
    for vector in published["frames"]:
        frame = bytes.fromhex(vector["hex"])
        assert frame[0] == vector["status"]
        assert (json.loads(frame[25:]) if frame[25:] else None) == vector["error"]
        with pytest.raises((NotAccepted, EntryTooLarge)):
            ack_from_bytes(frame)
