"""What producers write: logs for the laws, from drawn scripts (ops.py) or by hand, with what the model says of them.

A :class:`Scribe` has a reference model at its side, so that it knows the next sequence, the newest schema, the segments
that grow; one pass gives a log and its expected rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pyarrow as pa

from millrace.message.ids import LogId
from millrace.message.log_entries import ENTRY_SCHEMA, LogEntries
from millrace.message.model import MutableMessage
from millrace.message.types import MessageType as T
from millrace.message.wire.encode import encode_entry
from millrace.message.wire.layout import ASSERTED_PREFIX
from millrace.message.wire.stamp import stamp_entries
from tests.laws.model import Model
from tests.laws.ops import SCRIPTS, Frame
from tests.laws.parts import CHAIN_VERSIONS, GENERATION, Batch, Key, Msg, Row, VChannel, home
from tests.laws.rules import FACTOR, Rules, less_than, ruling, twice

PCHANNEL = "p0"
START_MS = 1_700_000_000_000
CONFIG = {
    "max_message_bytes": 2_000,
    "segment_bytes": 1_200,
    "segment_rows": 12,
    "segment_lifetime_ms": 1_000,
    "segment_idle_bytes": 500,
    "segment_idle_ms": 300,
    "blocking_delete_rows": 5,
    "max_txn_keepalive_ms": 200,
    "default_txn_keepalive_ms": 50,
    "max_txn_lifetime_ms": 400,
    "max_txn_bytes": 700,
    "max_open_txns": 3,
    "dedup_results": 3,
    "max_producers": 2,
    "max_vchannels": 3,
    "max_partitions": 3,
}
"""Limits that a log of a dozen entries reaches."""

Fields = tuple[tuple[str, str, bool], ...]
FIELDS: Fields = (("id", "int64", False), ("name", "string", False))
ARROW: dict[str, pa.DataType] = {"int32": pa.int32(), "int64": pa.int64(), "string": pa.utf8()}
COLLECTIONS = {1: ["p0_1v0", "p0_1v1"], 2: ["p0_2v0"], 3: ["p0_3v0", "p9_3v1"], 4: ["p0_4v0"]}
VCHANNELS = ["p0_1v0", "p0_1v1", "p0_2v0", "p0_3v0", "p0_4v0", "p9_3v1", ""]


@cache
def keys_at(place: int, count: int, kinds: tuple[str, ...] = ("int64",), most: int = 60) -> list[int]:
    """Some numbers whose keys have VChannel `place` of `count` as their home."""
    return [number for number in range(most) if home(key_of(number, kinds), count) == place]


def key_of(number: int, kinds: tuple[str, ...]) -> Key:
    """The primary key of the row that is made of a number, by the types of its fields."""
    values = tuple(f"n{number}" if kind == "string" else number for kind in kinds)
    return values if len(values) > 1 else values[0]


def kinds_of(fields: Fields, key: tuple[str, ...]) -> tuple[str, ...]:
    """The types of a key's fields; of one that has none among `fields`, an int64's."""
    return tuple(kind for name in key for each, kind, _ in fields if each == name) or ("int64",)


def rows_payload(
    fields: Fields,
    keys: list[int],
    nulls: str = "",
    key: tuple[str, ...] = ("id",),
    computed: frozenset[str] = frozenset(),
    computed_as: int | None = None,
) -> tuple[bytes, Batch]:
    """An encoded record batch and what it means.

    The field `nulls`, where it is there, is null in the first row, `computed` ones are twice the number
    of their row, or `computed_as`.
    """
    nulls = nulls if nulls in [name for name, _, _ in fields] else ""
    columns: list[pa.Array] = []
    for name, kind, _ in fields:
        values: list[Any] = list(keys) if kind != "string" else [f"n{number}" for number in keys]
        if name in computed:
            values = [FACTOR * number if computed_as is None else computed_as for number in keys]
        if name == nulls:
            values[0] = None
        columns.append(pa.array(values, ARROW[kind]))
    schema = pa.schema([pa.field(name, ARROW[kind], null) for name, kind, null in fields])
    payload = pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()
    kinds = kinds_of(fields, key)
    known = tuple(key_of(number, kinds) for place, number in enumerate(keys) if nulls not in key or place)
    return payload, Batch(fields, len(keys), known, frozenset({nulls} - {""}), tuple(keys), computed_as)


def body(**values: object) -> bytes:
    return json.dumps(values).encode()


def create_body(
    collection_id: int, partitions: int = 1, *, replaces: bool = False, key: Any = "id", rules: int = 0
) -> bytes:
    """With `rules` 1 some that hold of most rows, with 2 a computed field of no field, with 3 a check of a string."""
    schema: dict[str, Any] = {
        "fields": [{"name": name, "type": kind, "nullable": null} for name, kind, null in FIELDS],
        "primary_key": key,
        "event_time": None,
        **({"on_duplicate": "replace"} if replaces else {}),
    }
    if rules:
        schema["fields"] += [
            {"name": "level", "type": "int32", "nullable": True, "default": [["literal", "int64", "3"]]},
            {"name": "double", "type": "int64", "nullable": True, "computed": twice("id" if rules != 2 else "nothing")},
        ]
        schema["checks"] = [
            {"name": "small", "condition": less_than("id" if rules != 3 else "name", 30)},
            {"name": "halves", "condition": less_than("double", 100)},
        ]
    names = {f"part{place}": place for place in range(1, partitions + 1)}
    return body(name=f"c{collection_id}", vchannels=COLLECTIONS[collection_id], schema=schema, partitions=names)


def opening(term: int, config: dict[str, int] | None = None) -> Msg:
    values = {"chain_version": CHAIN_VERSIONS[-1], "config": CONFIG if config is None else config}
    return Msg(T.TERM_OPENING, term=term, payload=body(**values))


def collection_of(vchannel: str) -> int:
    return int(vchannel.split("_")[1].split("v")[0]) if vchannel else 0


@dataclass
class Written:
    """A log, and what the model says of it."""

    entries: list[tuple[LogId, int, bytes]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # messages of each entry; garbage counts as one
    rows: list[list[Row]] = field(default_factory=list)  # of each entry
    snapshots: list[dict[str, Any]] = field(default_factory=list)  # after each entry

    def read(self, begin: int = 0, end: int | None = None) -> LogEntries:
        """Entries [begin, end) by their place, as a log backend gives them."""
        chosen = self.entries[begin:end]
        columns = [
            [log_id.ledger for log_id, _, _ in chosen],
            [log_id.entry for log_id, _, _ in chosen],
            [physical_ms for _, physical_ms, _ in chosen],
            [value for _, _, value in chosen],
        ]
        arrays = [pa.array(values, spec.type) for values, spec in zip(columns, ENTRY_SCHEMA, strict=True)]
        following = chosen[-1][0].following() if chosen else LogId(0, 0)
        return LogEntries(pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA), following)

    def flat(self, begin: int = 0, end: int | None = None) -> list[Row]:
        return [row for rows in self.rows[begin:end] for row in rows]


PRINCIPALS = (None, "ada", "asserted:etl", "bo", "ada")
"""Who appends one entry after the other."""


def singly(ops: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The ops, with a burst as its inserts (an upsert and a delete now and then)."""
    for op in ops:
        if op[0] != "burst":
            yield op
            continue
        _, frame, partition, count, txn = op
        for number in range(count):
            yield (
                ("upsert", "delete")[number % 7 - 5] if number % 7 > 4 else "insert",
                frame,
                partition,
                1 + number % 2,
                txn,
                0,
                0,
            )


class Scribe:
    """Writes a log, with the model that judges it as it is written."""

    def __init__(self) -> None:
        self.model = Model(PCHANNEL)
        self.written = Written()
        self.physical_ms = START_MS

    def append(self, messages: list[Msg] | bytes, *, after_ms: int = 0) -> list[Row]:
        """Write one entry; the model's rows for it."""
        log_id = self.begin(after_ms)
        rows = self.model.entry(self.physical_ms, log_id, messages)
        self.end(log_id, messages)
        return rows

    def append_ops(self, ops: list[tuple[Any, ...]], *, after_ms: int = 0) -> None:
        """Write one entry of drawn ops, each made when the model has seen the one before it."""
        log_id = self.begin(after_ms)
        self.model.begin_entry(self.physical_ms, log_id)
        messages: list[Msg] = []
        flat = list(singly(ops))
        for op in flat:
            messages.append(self.message_of(op))
            self.model.message(messages[-1], last=len(messages) == len(flat))
        self.end(log_id, messages)

    def begin(self, after_ms: int) -> LogId:
        self.physical_ms += after_ms
        self.model.principal = PRINCIPALS[len(self.written.entries) % len(PRINCIPALS)]
        return LogId(self.model.position[0] // GENERATION * GENERATION, len(self.written.entries) + 1)

    def end(self, log_id: LogId, messages: list[Msg] | bytes) -> None:
        value = messages if isinstance(messages, bytes) else self.encoded(messages)
        self.written.entries.append((log_id, self.physical_ms, value))
        self.written.counts.append(1 if isinstance(messages, bytes) else len(messages))
        self.written.rows.append(self.model.rows)
        self.written.snapshots.append(self.model.snapshot())

    def encoded(self, messages: list[Msg]) -> bytes:
        """The entry of messages, as a server or the producer itself names who appends it."""
        said = self.model.principal or ""
        name = said.removeprefix(ASSERTED_PREFIX)
        value = encode_entry([on_the_wire(message) for message in messages], principal=name if name != said else "")
        if not said or name != said:
            return value
        stamped: bytes = stamp_entries(pa.array([value], pa.large_binary()), name)[0].as_py()
        return stamped

    def usual_opening(self, *, replaces: bool = False, key: Any = "id", rules: int = 0) -> None:
        """Term 1 with the small limits, collections 1 (two VChannels, two partitions;
        `key`, `rules`) and 2 (one of each).
        """
        first = create_body(1, 2, key=key, rules=rules)
        creates = [Msg(T.CREATE_COLLECTION, name, collection_id=1, payload=first) for name in COLLECTIONS[1]]
        creates.append(Msg(T.CREATE_COLLECTION, "p0_2v0", collection_id=2, payload=create_body(2, replaces=replaces)))
        self.append([opening(1), *creates])

    def message_of(self, op: tuple[Any, ...]) -> Msg:
        """The message of one op."""
        name, frame, *choices = op
        ends_txn = name in ("commit", "rollback", "keep_alive") and choices[0] < 2
        if ends_txn and not self.model.open:
            ends_txn, name, choices = False, "begin", [0, 0]
        existing = sorted(self.model.vchannels)
        absent = [name for name in VCHANNELS if name not in existing]
        anew = name == "create_collection" and choices[0] != 3
        names = [*absent, *existing] if anew else [*existing, *absent]
        vchannel = names[frame.vchannel % len(names)]
        if ends_txn:
            vchannel = self.model.open[-choices[0]].vchannel
        collection_id = collection_of(vchannel)
        header: dict[str, Any] = {
            "vchannel": vchannel,
            "collection_id": (collection_id, collection_id + 1, 0)[frame.collection],
        }
        header["term"] = max(0, self.model.term + frame.term)
        ahead = (0, self.model.last_tick, (self.physical_ms + 1) << 18, (self.physical_ms + 60) << 18)
        header["barrier_tick"] = [*ahead, (self.physical_ms + 86_400_001) << 18][frame.barrier]
        header |= self.producer_header(vchannel, frame)
        made: Msg = getattr(self, "make_" + name)(header, *choices)
        return made

    def producer_header(self, vchannel: str, frame: Frame) -> dict[str, int]:
        if not frame.producer:
            return {}
        state = self.model.vchannels.get(vchannel)
        known = state.producers.get(frame.producer) if state else None
        epoch, following = (known.epoch, known.next) if known else (0, 0)
        if frame.epoch:
            epoch, following = max(0, epoch + frame.epoch), 0
        return {"producer_id": frame.producer, "epoch": epoch, "sequence": max(0, following + frame.sequence)}

    def txn_id_of(self, vchannel: str, choice: int) -> int:
        """0: the first open one here, or none, 1: the last, 2: the last that ended, 3: an unknown one."""
        state = self.model.vchannels.get(vchannel)
        here = [txn.txn_id for txn in self.model.open if txn.vchannel == vchannel]
        ended = [txn_id for txn_id, _ in state.ended] if state else []
        return ([*here, 0][0], [0, *here][-1], [78, *ended][-1], 79)[choice]

    def partition_of(self, vchannel: str, choice: int) -> int:
        state = self.model.vchannels.get(vchannel)
        known = sorted(state.partitions.values()) if state else []
        return ([*known, 1][0], [1, *known][-1], 9, 0)[choice]

    # Each method below makes the message of the op of its name.

    def make_insert(self, header: dict[str, Any], partition: int, rows: int, txn: int, version: int, flaw: int) -> Msg:
        return self.dml(T.INSERT, header, partition, rows, txn, version, flaw)

    def make_delete(self, header: dict[str, Any], partition: int, rows: int, txn: int, version: int, flaw: int) -> Msg:
        return self.dml(T.DELETE, header, partition, rows, txn, version, flaw)

    def make_upsert(self, header: dict[str, Any], partition: int, rows: int, txn: int, version: int, flaw: int) -> Msg:
        return self.dml(T.UPSERT, header, partition, rows, txn, version, flaw)

    def dml(self, kind: T, header: dict[str, Any], partition: int, rows: int, txn: int, version: int, flaw: int) -> Msg:
        state = self.model.vchannels.get(header["vchannel"])
        schemas = state.schemas if state else {1: list(FIELDS)}
        schema_version = max(0, max(schemas) + version)
        fields: Fields = tuple(schemas.get(schema_version, FIELDS))
        key = state.primary_keys.get(schema_version, ("id",)) if state else ("id",)
        kinds = kinds_of(fields, key)
        if kind == T.DELETE:
            fields = tuple(spec for name in key for spec in fields if spec[0] == name)
        names = state.vchannels if state else [header["vchannel"]]
        place = names.index(header["vchannel"]) if header["vchannel"] in names else 0
        keys = keys_at(place, len(names), kinds)[:rows]
        if flaw == 1:
            keys = [*keys[1:], *keys_at((place + 1) % len(names), len(names), kinds)[:1]]
        if flaw == 2:
            fields = (*fields, ("more", "int64", True))
        if flaw == 3:
            fields = (*fields[1:], ("name2", "string", False)) if kind != T.DELETE else (("id", "string", False),)
        if flaw == 8:
            keys = [*keys, keys[0]]
        if flaw == 7 and kind != T.DELETE:
            keys = keys_at(place, len(names), kinds, 400)
        nulls = {4: key[0], 5: "name"}.get(flaw, "") if kind != T.DELETE else ""
        rules = state.rules.get(schema_version, Rules()) if state else Rules()
        computed = frozenset(rules.computed) & {name for name, _, _ in fields}
        payload, batch = rows_payload(fields, keys, nulls, key, computed, 1 if flaw == 6 else None)
        said = len(keys) + (flaw == 6 and not computed)
        more: dict[str, Any] = {"rows": said, "schema_version": schema_version}
        more["partition_id"] = self.partition_of(header["vchannel"], partition)
        more["txn_id"] = self.txn_id_of(header["vchannel"], txn - 1) if txn else 0
        if flaw == 4 and kind == T.DELETE:
            return Msg(kind, **header, **more, payload=b"no record batch", batch=None)
        return Msg(kind, **header, **more, payload=payload, batch=batch)

    def make_begin(self, header: dict[str, Any], txn: int, choice: int) -> Msg:
        here = [txn.txn_id for txn in self.model.open if txn.vchannel == header["vchannel"]]
        txn_id = (min(set(range(1, 11)) - set(here)), [*here, 1][0], 0)[txn]
        payload = [b"", body(keepalive_ms=150), body(keepalive_ms=201), body(keepalive_ms="x"), body(keepalive_ms=20)][
            choice
        ]
        return Msg(T.BEGIN_TXN, **header, txn_id=txn_id, payload=payload)

    def make_keep_alive(self, header: dict[str, Any], txn: int) -> Msg:
        return Msg(T.KEEP_ALIVE, **header, txn_id=self.txn_id_of(header["vchannel"], txn))

    def make_commit(self, header: dict[str, Any], txn: int) -> Msg:
        return Msg(T.COMMIT_TXN, **header, txn_id=self.txn_id_of(header["vchannel"], txn))

    def make_rollback(self, header: dict[str, Any], txn: int) -> Msg:
        return Msg(T.ROLLBACK_TXN, **header, txn_id=self.txn_id_of(header["vchannel"], txn))

    def make_tick(self, header: dict[str, Any]) -> Msg:
        return Msg(T.TIME_TICK, **header | {"vchannel": "", "collection_id": 0})

    def make_create_collection(self, header: dict[str, Any], choice: int) -> Msg:
        collection_id = collection_of(header["vchannel"]) or 1
        usual, replacing = create_body(collection_id), create_body(collection_id, replaces=True)
        several = create_body(collection_id, replaces=True, key=["id", "name"])
        twice_there = create_body(collection_id, key=["id", "id"])
        ruled = [create_body(collection_id, replaces=place == 1, rules=place) for place in (1, 2, 3)]
        payload = [usual, b"{", body(name="c"), usual, replacing, several, twice_there, *ruled][choice]
        return Msg(T.CREATE_COLLECTION, **header, payload=payload)

    def make_drop_collection(self, header: dict[str, Any]) -> Msg:
        return Msg(T.DROP_COLLECTION, **header)

    def make_create_partition(self, header: dict[str, Any], partition: int, renamed: int) -> Msg:
        return Msg(
            T.CREATE_PARTITION, **header, partition_id=partition, payload=body(name=f"part{partition + renamed}")
        )

    def make_drop_partition(self, header: dict[str, Any], partition: int) -> Msg:
        return Msg(T.DROP_PARTITION, **header, partition_id=self.partition_of(header["vchannel"], partition))

    def make_schema_change(self, header: dict[str, Any], choice: int) -> Msg:
        state = self.model.vchannels.get(header["vchannel"])
        version = (max(state.schemas) if state else 1) + 1 + (choice == 1)
        name = "name" if choice == 2 else f"added{version}"
        payload = b"[]" if choice == 4 else body(add={"name": name, "type": "int64", "nullable": choice != 3})
        if choice > 4:
            payload = body(changes=self.changes(state, version, choice - 5))
        return Msg(T.SCHEMA_CHANGE, **header, schema_version=version, payload=payload)

    def changes(self, state: VChannel | None, version: int, choice: int) -> list[dict[str, Any]]:
        """Changes of the newest schema: some that can be, several at once, and some that cannot."""
        newest = max(state.schemas) if state else 1
        fields = state.schemas[newest] if state else list(FIELDS)
        keys = state.primary_keys[newest] if state else ("id",)
        key, others = keys[-1], [name for name, _, _ in fields if name not in keys] or ["nothing"]
        kinds = [(name, kind) for name, kind, _ in fields]
        narrow = next((name for name, kind, _ in fields if kind == "int32"), f"narrow{version}")
        added = {"op": "add", "field": {"name": f"narrow{version}", "type": "int32", "nullable": True}}
        struct = {"name": f"inside{version}", "type": "struct<a: int32, b: string>", "nullable": True}
        inside, gone = {"op": "add", "field": struct}, {"op": "drop", "name": struct["name"]}
        part = {"name": struct["name"], "path": ["a"]}
        rename = {"op": "rename", "name": others[-1], "to": f"other{version}"}
        return [
            [{"op": "drop", "name": others[0]}],
            [{"op": "rename", "name": key, "to": f"key{version}"}],
            [rename],
            [{"op": "reorder", "names": [name for name, _, _ in reversed(fields)]}],
            [added, {"op": "relax", "name": others[0]}],
            [added, {"op": "widen", "name": narrow, "type": "int64"}],
            [added, rename, {"op": "drop", "name": f"narrow{version}"}],
            [{"op": "drop", "name": key}],
            [rename, {"op": "drop", "name": others[-1]}],
            [{"op": "rename", "name": others[-1], "to": key.upper()}],
            [{"op": "drop", "name": others[0], "to": "?"}],
            *ruling(
                state.rules[newest] if state else Rules(),
                version,
                narrow,
                next((name for name in keys if dict(kinds)[name] != "string"), key),
            ),
            [inside, {**part, "op": "rename_part", "to": "c"}, {**part, "op": "drop_part", "path": ["b"]}, gone],
            [inside, {**part, "op": "drop_part"}, {**part, "op": "rename_part", "to": "c"}, gone],
            [{**part, "op": "rename_part", "name": others[0], "to": "c"}],
        ][choice]

    def make_import(self, header: dict[str, Any], partitions: list[int], replace: bool, version: int, flaw: int) -> Msg:
        state = self.model.vchannels.get(header["vchannel"])
        files: list[dict[str, Any]] = [
            {
                "path": f"load/{place}.parquet",
                "partition_id": self.partition_of(header["vchannel"], partition) or 1,
                "rows": 2 + place,
                "bytes": 600 + place,
                "digest": f"{place:064x}",
            }
            for place, partition in enumerate(partitions)
        ]
        said = sum(each["rows"] for each in files) + (flaw == 1)
        more: dict[str, Any] = {"partition_id": int(flaw == 2), "txn_id": int(flaw == 3)}
        more["schema_version"] = max(0, (max(state.schemas) if state else 1) + version)
        if files and flaw in (4, 5, 6, 7):
            wrong = {4: {"path": "../load/0.parquet"}, 5: {"digest": "0"}, 6: {"rows": 0}, 7: {"more": 1}}
            files[-1] |= wrong[flaw]
        payload = b"" if flaw == 8 else body(import_id="load", files=files, replace=replace)
        return Msg(T.IMPORT, **header, **more, rows=said, payload=payload)

    def make_manual_flush(self, header: dict[str, Any], partition: int, choice: int) -> Msg:
        segments = [*sorted(self.model.segments), 1]
        payload = [b"", body(segment_id=segments[0]), body(segment_id=0), b"nonsense"][choice]
        partition_id = self.partition_of(header["vchannel"], (3, 0, 2, 1)[partition])
        return Msg(T.MANUAL_FLUSH, **header, partition_id=partition_id, payload=payload)

    def make_flush_all(self, header: dict[str, Any], astray: int) -> Msg:
        return Msg(T.FLUSH_ALL, **header if astray else header | {"vchannel": "", "collection_id": 0})

    def make_opening(self, header: dict[str, Any], choice: int) -> Msg:
        wrong = [b"", body(chain_version=1, config={"nonsense": 1})]
        changed = [CONFIG, {"segment_rows": 4}]
        version = CHAIN_VERSIONS[-1 - (choice == 4)]
        payload = wrong[choice - 2] if choice in (2, 3) else body(chain_version=version, config=changed[choice == 1])
        return Msg(
            T.TERM_OPENING, **header | {"vchannel": "", "collection_id": 0, "term": header["term"] + 1}, payload=payload
        )

    def make_config(self, header: dict[str, Any], choice: int) -> Msg:
        payload = [
            body(segment_rows=4),
            body(blocking_delete_rows=2, max_open_txns=1),
            body(default_txn_keepalive_ms=120, segment_bytes=900),
            body(max_message_bytes=500),
            body(max_txn_lifetime_ms=60, segment_lifetime_ms=200, segment_idle_ms=20),
            body(dedup_results=1, max_producers=1, max_vchannels=1, max_partitions=1),
            body(dedup_results=9, max_producers=9, max_txn_bytes=5_000, max_open_txns=9),
            body(segment_rows=0),
            body(segment_rows="many"),
            body(nonsense=1),
            b"[1]",
        ][choice]
        return Msg(T.CONFIG, **header | {"vchannel": "", "collection_id": 0}, payload=payload)

    def make_alter_wal(self, header: dict[str, Any], choice: int) -> Msg:
        generation = self.model.position[0] // GENERATION
        right = body(generation=generation + 1, log="kafka://b:9092/p")
        payload = [right, body(generation=generation or 7, log=""), body(generation=0, log=""), b"", right][choice]
        if choice < 4:
            header |= {"vchannel": "", "collection_id": 0}
        return Msg(T.ALTER_WAL, **header, payload=payload)

    def make_foreign(self, header: dict[str, Any], number: int) -> Msg:
        return Msg(number, **header)


def on_the_wire(message: Msg) -> MutableMessage:
    """The message as the wire form takes it: all but what its payload means."""
    header = {name: value for name, value in vars(message).items() if name != "batch"}
    return MutableMessage(**header)


def write(script: tuple[str, list[tuple[int, list[tuple[Any, ...]] | bytes]]]) -> Scribe:
    """Write the log of a drawn script."""
    usual, entries = script
    scribe = Scribe()
    if usual:
        key = ["name", "id"] if usual == "two keys" else "id"
        scribe.usual_opening(replaces=usual == "replace", key=key, rules=int(usual == "rules"))
    for after_ms, ops in entries:
        if isinstance(ops, bytes):
            scribe.append(ops, after_ms=after_ms)
            continue
        scribe.append_ops(ops, after_ms=after_ms)
    return scribe


LOGS = SCRIPTS.map(write)
"""Written logs: scribes that have finished."""
