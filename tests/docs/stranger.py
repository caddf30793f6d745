"""A client of the log server, written from docs/wire-form.md alone with pyarrow and the standard library.

    python tests/docs/stranger.py <data folder>/log/server.json

It creates a collection, writes to it as an idempotent producer, repeats messages, sends wrong ones, and reads it all
back. It prints what it found as JSON.
"""

from __future__ import annotations

import json
import secrets
import struct
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

# --- an entry ---------------------------------------------------------------------------------------------------------

COLUMNS = {
    "type": "H", "vchannel": "H", "term": "q", "collection_id": "q", "partition_id": "q", "schema_version": "i",
    "rows": "q",
    "txn_id": "q", "producer_id": "q", "epoch": "i", "sequence": "q", "barrier_tick": "q", "payload_length": "I",
}  # fmt: skip
INSERT, DELETE, BEGIN_TXN, COMMIT_TXN = 400, 401, 1305, 1306


def crc32c(data: bytes) -> int:
    found = 0xFFFFFFFF
    for byte in data:
        found ^= byte
        for _ in range(8):
            found = (found >> 1) ^ (0x82F63B78 if found & 1 else 0)
    return found ^ 0xFFFFFFFF


def entry(messages: list[dict[str, Any]]) -> bytes:
    """Encode an entry with every column in full; a reader accepts every form."""
    names = list(dict.fromkeys(message.get("vchannel", "") for message in messages))
    for message in messages:
        message["payload_length"] = len(message.get("payload", b""))
    columns = b""
    for name, kind in COLUMNS.items():
        for message in messages:
            value = names.index(message.get("vchannel", "")) if name == "vchannel" else message.get(name, 0)
            columns += struct.pack("<" + kind, value)
    dictionary = struct.pack("<H", len(names))
    for name in names:
        dictionary += struct.pack("<H", len(name.encode())) + name.encode()
    body = b"".join(message.get("payload", b"") for message in messages)
    rest = struct.pack("<BBHIIII", 1, 0, 0, len(messages), len(columns), len(dictionary), len(body))
    rest += bytes([2] * len(COLUMNS)) + columns + dictionary + body
    return b"MLRW" + struct.pack("<I", crc32c(rest)) + rest


def home(key: int, vchannels: list[str]) -> str:
    found = 0xCBF29CE484222325
    for byte in struct.pack("<q", key):
        found = ((found ^ byte) * 0x100000001B3) % (1 << 64)
    return vchannels[(found ^ (found >> 32)) % len(vchannels)]


# --- the server -------------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, address: str, token: str) -> None:
        self.client = flight.FlightClient(address)
        self.options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())], timeout=60.0)

    def act(self, name: str, **request: Any) -> Any:
        [found] = self.client.do_action(flight.Action(name, json.dumps(request).encode()), self.options)
        return json.loads(found.body.to_pybytes())

    def catalog(self, call: str, **arguments: Any) -> Any:
        return self.act("append/catalog", call=call, arguments=arguments)

    def get(self, **ticket: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        reader = self.client.do_get(flight.Ticket(json.dumps(ticket).encode()), self.options)
        rows, last = [], {}
        for chunk in reader:
            rows += chunk.data.to_pylist()
            last = json.loads(chunk.app_metadata.to_pybytes())
        return rows, last


class Appends:
    """A stream of appends to one PChannel."""

    def __init__(self, server: Server, pchannel: str) -> None:
        command = json.dumps({"extension": "append", "pchannel": pchannel}).encode()
        self.schema = pa.schema([pa.field("value", pa.large_binary(), nullable=False)])
        self.writer, self.reader = server.client.do_exchange(
            flight.FlightDescriptor.for_command(command), server.options
        )
        self.writer.begin(self.schema)

    def append(self, *entries: bytes) -> list[dict[str, Any]]:
        batch = pa.record_batch([pa.array(entries, pa.large_binary())], schema=self.schema)
        self.writer.write_with_metadata(batch, struct.pack("<d", 30.0))
        answer = self.reader.read_chunk()
        if answer.data is not None:
            rows: list[dict[str, Any]] = answer.data.to_pylist()
            return rows
        data = answer.app_metadata.to_pybytes()
        status, _, _, _ = struct.unpack_from("<BQqq", data)
        raise RuntimeError(json.dumps({"status": status, "error": json.loads(data[25:])}))


def main(record: dict[str, Any]) -> dict[str, Any]:
    server = Server(record["address"], record["token"])
    found: dict[str, Any] = {"names": server.act("names")["names"]}
    schema = {
        "fields": [
            {"name": "id", "type": "int64", "nullable": False},
            {"name": "name", "type": "string", "nullable": True},
        ],
        "primary_key": "id",
    }
    made = server.catalog("create_collection", name="strangers", schema=schema, vchannels=2, partitions=["all"])
    producer, epoch = secrets.randbits(62) + 1, 1
    arrow = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])

    streams = {name: Appends(server, name) for name in {each.rpartition("_")[0] for each in made["vchannels"]}}
    sequences = dict.fromkeys(made["vchannels"], 0)

    def header(kind: int, vchannel: str, **more: Any) -> dict[str, Any]:
        sequence = sequences[vchannel]
        sequences[vchannel] += 1
        term = server.catalog("term", pchannel=vchannel.rpartition("_")[0])["term"]
        return {
            "type": kind, "vchannel": vchannel, "term": term, "collection_id": made["id"],
            "producer_id": producer, "epoch": epoch, "sequence": sequence, **more,
        }  # fmt: skip

    def insert(vchannel: str, keys: list[int], **more: Any) -> dict[str, Any]:
        batch = pa.record_batch([pa.array(keys), pa.array([f"row {key}" for key in keys])], schema=arrow)
        return header(
            INSERT, vchannel, partition_id=made["partitions"]["all"], schema_version=len(made["schemas"]),
            rows=len(keys), payload=batch.serialize().to_pybytes(), **more,
        )  # fmt: skip

    def append(vchannel: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        return streams[vchannel.rpartition("_")[0]].append(entry(list(messages)))

    keys = {name: [key for key in range(20) if home(key, made["vchannels"]) == name] for name in made["vchannels"]}
    found["keys"] = keys
    found["inserted"] = []
    for vchannel, mine in keys.items():
        message = insert(vchannel, mine)
        [first] = append(vchannel, message)
        [again] = append(vchannel, message)  # as after a lost answer
        found["inserted"].append({"first": first, "again": again})

    vchannel, other = made["vchannels"]
    gone = pa.record_batch([pa.array(keys[vchannel][:1])], schema=pa.schema([arrow.field("id")]))
    found["deleted"] = append(
        vchannel,
        header(DELETE, vchannel, schema_version=1, rows=1, payload=gone.serialize().to_pybytes()),
    )
    found["transaction"] = append(
        vchannel,
        header(BEGIN_TXN, vchannel, txn_id=5),
        insert(vchannel, keys[vchannel][:1], txn_id=5),
        header(COMMIT_TXN, vchannel, txn_id=5),
    )
    [astray] = append(vchannel, insert(vchannel, keys[other][:1]))
    [gap] = append(vchannel, {**insert(vchannel, keys[vchannel][:1]), "sequence": 99})
    found["refused"] = [astray["reason"], gap["reason"]]
    taken = server.catalog("next_epoch", producer_id=producer)["epoch"]
    [takes_over] = append(vchannel, {**insert(vchannel, keys[vchannel][:1]), "epoch": taken + 1, "sequence": 0})
    [fenced] = append(vchannel, insert(vchannel, keys[vchannel][:1]))
    found["takeover"] = [takes_over["reason"], fenced["reason"]]

    pchannel = vchannel.rpartition("_")[0]
    tick = server.act("append/tick", pchannel=pchannel, deadline=30.0)["tick"]
    found["confirmed"] = server.act("append/confirm", pchannel=pchannel, tick=tick, deadline=30.0)["tick"] >= tick
    found["mvcc"] = server.act("append/mvcc", vchannel=vchannel)
    rows, last = server.get(extension="append", tail=pchannel, after=0, timeout=5.0)
    found["tail"] = [[row["type"], row["vchannel"], row["rows"], row["time_tick"]] for row in rows]
    found["tail_confirmed"] = last["confirmed"] >= tick
    begin = server.act("describe", pchannel=pchannel)
    entries, last = server.get(pchannel=pchannel, position=begin["begin"], max_bytes=1 << 20, timeout=5.0)
    found["log"] = {"framed": all(each["value"][:4] == b"MLRW" for each in entries), "count": len(entries)}
    found["log_end"] = last["next"] == server.act("describe", pchannel=pchannel)["end"]
    found["errors"] = {}
    try:
        server.catalog("collection", name="nobody")
    except flight.FlightError as error:
        found["errors"]["collection"] = json.loads(error.extra_info)["code"]
    try:
        tick = entry([{"type": 1200}])
        streams[pchannel].append(tick[:24] + struct.pack("<I", 17 << 20) + tick[28:] + bytes(17 << 20))
    except RuntimeError as error:
        found["errors"]["append"] = json.loads(str(error))
    try:
        Server(record["address"], "not the token").act("names")
    except flight.FlightUnauthenticatedError:
        found["errors"]["token"] = "UNAUTHENTICATED"
    for stream in streams.values():
        stream.writer.close()
    found["foreign"] = sorted(name for name in sys.modules if name.split(".")[0] == "millrace")
    return found


if __name__ == "__main__":
    json.dump(main(json.loads(Path(sys.argv[1]).read_text())), sys.stdout)
