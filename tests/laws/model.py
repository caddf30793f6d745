"""The reference model of the chain: docs/chain.md, rule by rule, one message at a time, in dicts and lists.

It promises to be obviously right and nothing else: it is slow, keeps no history and shares no code with
`millrace.wal` (only names of types and reasons). The laws compare the real chain with it row for row.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from millrace.wal.reasons import Reason
from tests.laws.machine import Machine
from tests.laws.parts import (
    CHAIN_VERSIONS,
    DEFAULTS,
    GENERATION,
    Msg,
    Refused,
    Segment,
    T,
    Txn,
    VChannel,
    body_of,
    changed,
    changes_of,
    checked_files,
    home,
    is_int,
    splitmix64,
)
from tests.laws.rules import first_rules, judge, ruled


class Model(Machine):
    """The chain over one PChannel: `entry` takes a log entry and gives its rows, `snapshot` shows the state."""

    # -- types: the WAL itself --------------------------------------------------------------------------------------

    def on_time_tick(self, message: Msg) -> None:
        tick = self.take_tick(message.barrier_tick)
        if self.row_since_tick:
            self.accept(message, tick)
            self.row_since_tick = False
        else:
            self.remember(message, self.id(), tick, None)

    def checked_config(self, config: object) -> dict[str, int]:
        if not isinstance(config, dict):
            raise Refused(Reason.MALFORMED, "config")
        for key, value in config.items():
            if key not in DEFAULTS or not is_int(value) or not 1 <= value < 1 << 63:
                raise Refused(Reason.MALFORMED, f"config {key}")
        return config

    def on_term_opening(self, message: Msg) -> None:
        body = body_of(message)
        if not is_int(body.get("chain_version")):
            raise Refused(Reason.MALFORMED, "chain_version")
        if body["chain_version"] not in CHAIN_VERSIONS:
            raise AssertionError("no host of this version runs such a log: the test must not open it")
        config = self.checked_config(body.get("config"))
        self.term, self.opened, self.chain_version = message.term, True, body["chain_version"]
        self.config.update(config)
        self.accept(message, self.take_tick(message.barrier_tick))

    def on_config(self, message: Msg) -> None:
        self.config.update(self.checked_config(body_of(message)))
        self.accept(message, self.take_tick(message.barrier_tick))

    def on_alter_wal(self, message: Msg) -> None:
        body = body_of(message)
        if not is_int(body.get("generation")) or body["generation"] < 1 or not isinstance(body.get("log"), str):
            raise Refused(Reason.MALFORMED)
        if message.vchannel or not self.last_of_entry:
            raise Refused(Reason.MALFORMED)
        generation = self.log_id[0] // GENERATION + 1
        if body["generation"] != generation:
            raise Refused(Reason.NO_EFFECT)
        self.accept(message, self.take_tick(message.barrier_tick))
        self.position = (generation * GENERATION, 0)

    # -- types: collections -----------------------------------------------------------------------------------------

    def accept_ddl(self, message: Msg) -> None:
        tick = self.take_tick(message.barrier_tick)
        self.vchannels[message.vchannel].mvcc = tick
        self.accept(message, tick)

    def on_create_collection(self, message: Msg) -> None:
        body = body_of(message)
        try:
            names, schema, partitions = list(body["vchannels"]), body["schema"], dict(body["partitions"])
            fields = [(f["name"], f["type"], f["nullable"]) for f in schema["fields"]]
            key, replaces = schema["primary_key"], schema.get("on_duplicate") == "replace"
            if not isinstance(body["name"], str) or not all(is_int(value) for value in partitions.values()):
                raise TypeError
            names_of_key = (key,) if isinstance(key, str) else tuple(key)
            for each in names_of_key:
                if not any(name == each and kind in ("int64", "string") and not null for name, kind, null in fields):
                    raise ValueError
            if len(set(names_of_key)) < len(names_of_key):
                raise ValueError
            if (replaces or len(names_of_key) > 1) and self.chain_version < 4:
                raise ValueError
            rules = first_rules(schema)
            if (rules.checks or rules.defaults or rules.computed) and self.chain_version < 4:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise Refused(Reason.MALFORMED) from None
        if message.collection_id == 0:
            raise Refused(Reason.MALFORMED, "collection_id")
        if not re.fullmatch(re.escape(f"{self.pchannel}_{message.collection_id}v") + "[0-9]+", message.vchannel):
            raise Refused(Reason.VCHANNEL_NOT_FOUND)
        if message.vchannel not in names:
            raise Refused(Reason.VCHANNEL_NOT_FOUND)
        if message.vchannel in self.vchannels:
            raise Refused(Reason.COLLECTION_EXISTS)
        if len(self.vchannels) >= self.config["max_vchannels"]:
            raise Refused(Reason.LIMIT_EXCEEDED)
        self.vchannels[message.vchannel] = VChannel(
            message.collection_id, names, {1: names_of_key}, {1: fields}, partitions, {1: rules}, replaces
        )
        self.accept_ddl(message)

    def on_drop_collection(self, message: Msg) -> None:
        self.collection(message)
        self.barrier(message.vchannel)
        for segment in self.growing(message.vchannel):
            self.seal(segment, "drop_collection")
        del self.vchannels[message.vchannel]
        self.accept(message, self.take_tick(message.barrier_tick))

    def on_create_partition(self, message: Msg) -> None:
        name = body_of(message).get("name")
        if not isinstance(name, str) or message.partition_id == 0:
            raise Refused(Reason.MALFORMED)
        vchannel = self.collection(message)
        if name in vchannel.partitions or message.partition_id in vchannel.partitions.values():
            raise Refused(Reason.PARTITION_EXISTS)
        if len(vchannel.partitions) >= self.config["max_partitions"]:
            raise Refused(Reason.LIMIT_EXCEEDED)
        self.barrier(message.vchannel)
        vchannel.partitions[name] = message.partition_id
        self.accept_ddl(message)

    def on_drop_partition(self, message: Msg) -> None:
        vchannel = self.collection(message)
        if message.partition_id not in vchannel.partitions.values():
            raise Refused(Reason.PARTITION_NOT_FOUND)
        self.barrier(message.vchannel)
        for segment in self.growing(message.vchannel, message.partition_id):
            self.seal(segment, "drop_partition")
        vchannel.partitions = {n: p for n, p in vchannel.partitions.items() if p != message.partition_id}
        self.accept_ddl(message)

    def on_schema_change(self, message: Msg) -> None:
        wanted = changes_of(body_of(message), several=self.chain_version >= 4)
        vchannel = self.collection(message)
        current = max(vchannel.schemas)
        if message.schema_version != current + 1:
            raise Refused(Reason.SCHEMA_MISMATCH)
        schema, key, rules = vchannel.schemas[current], vchannel.primary_keys[current], vchannel.rules[current]
        for change in wanted:
            kinds = {name: kind for name, kind, _ in schema}
            schema, key = changed(schema, key, change)
            rules = ruled(rules, kinds, change)
        self.barrier(message.vchannel)
        for segment in self.growing(message.vchannel):
            self.seal(segment, "schema_change")
        vchannel.schemas[current + 1], vchannel.primary_keys[current + 1] = schema, key
        vchannel.rules[current + 1] = rules
        self.accept_ddl(message)

    # -- types: rows ------------------------------------------------------------------------------------------------

    def dml(self, message: Msg) -> tuple[VChannel, Txn | None]:
        """The checks of an INSERT, DELETE or UPSERT, in their order."""
        vchannel = self.collection(message)
        all_partitions = message.type == T.DELETE and message.partition_id == 0
        if not all_partitions and message.partition_id not in vchannel.partitions.values():
            raise Refused(Reason.PARTITION_NOT_FOUND)
        schema = vchannel.schemas.get(message.schema_version)
        if schema is None:
            raise Refused(Reason.SCHEMA_MISMATCH)
        txn = self.txn_of(message) if message.txn_id else None
        if txn and txn.bytes + len(message.payload) > self.config["max_txn_bytes"]:
            raise Refused(Reason.TXN_TOO_LARGE)
        if message.type == T.DELETE:
            key = vchannel.primary_keys[message.schema_version]
            schema = [spec for name in key for spec in schema if spec[0] == name]
        batch = message.batch
        if batch is None or list(batch.fields) != schema or batch.rows == 0 or batch.rows != message.rows:
            raise Refused(Reason.SCHEMA_MISMATCH)
        if any(name in batch.nulls and not nullable for name, _, nullable in schema):
            raise Refused(Reason.SCHEMA_MISMATCH)
        if self.judged_as(message, vchannel) == T.UPSERT and len(set(batch.keys)) < len(batch.keys):
            raise Refused(Reason.DUPLICATE_KEY)
        names = vchannel.vchannels
        if any(names[home(key, len(names))] != message.vchannel for key in batch.keys):
            raise Refused(Reason.WRONG_VCHANNEL)
        if message.type != T.DELETE:
            judge(batch, vchannel.rules[message.schema_version], vchannel.rules[max(vchannel.rules)])
        return vchannel, txn

    def judged_as(self, message: Msg, vchannel: VChannel) -> T:
        """Where an insert replaces the row of its key, it is an upsert to all that follows."""
        return T.UPSERT if message.type == T.INSERT and vchannel.replaces else message.type

    def took_row(self, message: Msg, vchannel: VChannel, txn: Txn | None, tick: int) -> None:
        if txn:
            txn.bytes += len(message.payload)
            txn.renewed = tick
        else:
            vchannel.mvcc = tick

    def on_insert(self, message: Msg) -> None:
        vchannel, txn = self.dml(message)
        message = replace(message, type=self.judged_as(message, vchannel))
        grown = self.growing(message.vchannel, message.partition_id)
        segment = grown[0] if grown else self.create_segment(message, vchannel, message.partition_id)
        tick = self.take_tick(message.barrier_tick)
        self.took_row(message, vchannel, txn, tick)
        segment.rows, segment.bytes = segment.rows + message.rows, segment.bytes + len(message.payload)
        segment.last_insert = tick
        if txn and txn not in segment.txns:
            segment.txns.append(txn)
        self.accept(message, tick, segment_id=segment.id)
        if message.type == T.UPSERT:
            vchannel.deletes += message.rows
        jitter = splitmix64(segment.id) % 101
        if segment.bytes * 1000 >= self.config["segment_bytes"] * (1000 - jitter):
            segment.policy = "capacity"
        elif segment.rows >= self.config["segment_rows"]:
            segment.policy = "rows"
        full = [(segment, segment.policy)] if segment.policy else []
        self.seal_all(full + (self.blocked(message, vchannel) if message.type == T.UPSERT else []))

    on_upsert = on_insert

    def create_segment(self, message: Msg, vchannel: VChannel, partition_id: int) -> Segment:
        tick = self.take_tick()
        segment = Segment(tick, message.vchannel, message.collection_id, partition_id, vchannel.deletes)
        self.segments[tick] = segment
        self.emit(T.CREATE_SEGMENT, segment, tick, partition_id=partition_id, segment_id=tick)
        return segment

    def on_delete(self, message: Msg) -> None:
        vchannel, txn = self.dml(message)
        tick = self.take_tick(message.barrier_tick)
        self.took_row(message, vchannel, txn, tick)
        vchannel.deletes += message.rows
        self.accept(message, tick)
        self.seal_all(self.blocked(message, vchannel))

    def blocked(self, message: Msg, vchannel: VChannel) -> list[tuple[Segment, str]]:
        growing = self.growing(message.vchannel)
        if growing and vchannel.deletes - growing[0].deletes_before >= self.config["blocking_delete_rows"]:
            return [(segment, "blocking_deletes") for segment in growing]
        return []

    def on_import(self, message: Msg) -> None:
        body = body_of(message)
        files = checked_files(body)
        if message.partition_id or message.txn_id or message.rows != sum(each["rows"] for each in files):
            raise Refused(Reason.MALFORMED, "header")
        vchannel = self.collection(message)
        partitions = sorted({each["partition_id"] for each in files})
        if any(number not in vchannel.partitions.values() for number in partitions):
            raise Refused(Reason.PARTITION_NOT_FOUND)
        if message.schema_version not in vchannel.schemas:
            raise Refused(Reason.SCHEMA_MISMATCH)
        newest = max(vchannel.rules)
        if (vchannel.rules[newest].checks or vchannel.rules[newest].computed) and message.schema_version != newest:
            raise Refused(Reason.SCHEMA_MISMATCH)
        if vchannel.replaces and not body["replace"]:
            raise Refused(Reason.SCHEMA_MISMATCH)
        self.barrier(message.vchannel)
        for segment in self.growing(message.vchannel):
            self.seal(segment, "import")
        made = {number: self.create_segment(message, vchannel, number) for number in partitions}
        for each in files:
            made[each["partition_id"]].rows += each["rows"]
            made[each["partition_id"]].bytes += each["bytes"]
        tick = self.take_tick(message.barrier_tick)
        vchannel.mvcc = tick
        self.accept(message, tick, segment_id=made[partitions[0]].id if partitions else 0)
        for number in partitions:
            self.seal(made[number], "import")

    # -- types: transactions ----------------------------------------------------------------------------------------

    def on_begin_txn(self, message: Msg) -> None:
        keepalive = body_of(message, empty=True).get("keepalive_ms", self.config["default_txn_keepalive_ms"])
        if message.txn_id == 0 or not is_int(keepalive) or not 1 <= keepalive <= self.config["max_txn_keepalive_ms"]:
            raise Refused(Reason.MALFORMED)
        vchannel = self.vchannels.get(message.vchannel)
        if vchannel is None or message.collection_id not in (0, vchannel.collection_id):
            raise Refused(Reason.COLLECTION_NOT_FOUND)
        if any((txn.vchannel, txn.txn_id) == (message.vchannel, message.txn_id) for txn in self.open):
            raise Refused(Reason.TXN_EXISTS)
        if len(self.open) >= self.config["max_open_txns"]:
            raise Refused(Reason.LIMIT_EXCEEDED)
        tick = self.take_tick(message.barrier_tick)
        owner = (message.vchannel, vchannel.collection_id, message.txn_id)
        self.open.append(Txn(*owner, self.id(), tick, keepalive, renewed=tick))
        self.accept(message, tick)

    def on_keep_alive(self, message: Msg) -> None:
        txn = self.txn_of(message)
        txn.renewed = self.take_tick(message.barrier_tick)
        self.accept(message, txn.renewed)

    def on_commit_txn(self, message: Msg) -> None:
        txn = self.txn_of(message)
        released = self.end_txn(txn, "committed")
        self.accept_ddl(message)
        for segment in released:
            self.flush(segment)

    def on_rollback_txn(self, message: Msg) -> None:
        txn = self.txn_of(message)
        released = self.end_txn(txn, "rolled back")
        self.accept(message, self.take_tick(message.barrier_tick))
        for segment in released:
            self.flush(segment)

    # -- types: flushes ---------------------------------------------------------------------------------------------

    def on_manual_flush(self, message: Msg) -> None:
        wanted = body_of(message, empty=True).get("segment_id")
        if wanted is not None and not is_int(wanted):
            raise Refused(Reason.MALFORMED, "segment_id")
        self.collection(message)
        chosen = [s for s in self.growing(message.vchannel, message.partition_id) if wanted in (None, s.id)]
        if not chosen:
            raise Refused(Reason.NO_EFFECT)
        self.barrier(message.vchannel)
        for segment in chosen:
            self.seal(segment, "manual")
        self.accept_ddl(message)

    def on_flush_all(self, message: Msg) -> None:
        if message.vchannel:
            raise Refused(Reason.MALFORMED, "vchannel")
        self.barrier(None)
        for name in sorted(self.vchannels):
            for segment in self.growing(name):
                self.seal(segment, "flush_all")
        self.accept(message, self.take_tick(message.barrier_tick))

    # -- what the laws look at --------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The interesting state, in plain sorted values."""
        segments = sorted(self.segments.values(), key=lambda segment: segment.id)
        producers = {
            (name, producer_id): (producer.epoch, producer.next)
            for name, vchannel in sorted(self.vchannels.items())
            for producer_id, producer in sorted(vchannel.producers.items())
        }
        return {
            "position": self.position,
            "term": self.term,
            "last_tick": self.last_tick,
            "config": dict(sorted(self.config.items())),
            "mvcc": {name: vchannel.mvcc for name, vchannel in sorted(self.vchannels.items())},
            "txns": sorted((txn.vchannel, txn.txn_id, txn.begin) for txn in self.open),
            "growing": {s.id: (s.vchannel, s.partition_id, s.rows, s.bytes) for s in segments if s.policy is None},
            "sealed": [s.id for s in segments if s.policy],
            "producers": producers,
        }
