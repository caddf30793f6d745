"""The frame of the reference model: a message's way through the chain, its rows, transactions and segments.

What each message type does is in model.py, which this module leaves the public face to.
"""

from __future__ import annotations

import json
from typing import Any

from millrace.message.types import BEHAVIOUR, Flag, MessageType
from millrace.wal.reasons import SEQUENCE_NEUTRAL_REASONS, Reason
from tests.laws.parts import (
    DAY_MS,
    DEFAULTS,
    ENDED_REMEMBERED,
    SINCE,
    Id,
    Msg,
    Producer,
    Refused,
    Row,
    Segment,
    T,
    Txn,
    VChannel,
    continues,
    undecoded,
)


class Machine:
    """The chain over one PChannel."""

    def __init__(self, pchannel: str) -> None:
        self.pchannel, self.chain_version = pchannel, 1
        self.principal: str | None = None
        """Who appended the entry that is judged."""
        self.last_tick, self.term, self.opened, self.row_since_tick = 0, 0, False, True
        self.config = dict(DEFAULTS)
        self.vchannels: dict[str, VChannel] = {}
        self.open: list[Txn] = []
        self.segments: dict[int, Segment] = {}
        self.position = (0, 0)

    # -- a message's way --------------------------------------------------------------------------------------------

    def entry(self, physical_ms: int, log_id: tuple[int, int], messages: list[Msg] | bytes) -> list[Row]:
        """Take one entry: its messages, or bytes that do not decode. Returns its rows in id order."""
        self.begin_entry(physical_ms, log_id)
        taken = [undecoded(messages)] if isinstance(messages, bytes) else messages
        for place, message in enumerate(taken, 1):
            self.message(message, last=place == len(taken))
        return self.rows

    def begin_entry(self, physical_ms: int, log_id: tuple[int, int]) -> None:
        self.rows: list[Row] = []
        self.physical_ms, self.log_id, self.index = physical_ms, log_id, 0
        self.position = (log_id[0], log_id[1] + 1)

    def message(self, message: Msg, *, last: bool) -> None:
        """Take the next message of the entry, which may be its last."""
        self.ordinal, self.last_of_entry = 0, last
        self.fire_timers()
        try:
            self.in_sequence = False
            self.judge_envelope(message)
            self.judge_producer(message)
            getattr(self, "on_" + MessageType(message.type).name.lower())(message)
        except Refused as refused:
            if refused.reason not in SEQUENCE_NEUTRAL_REASONS:
                self.remember(message, self.id(), self.last_tick, refused.reason)
            self.add_row(message, self.last_tick, self.id(), reason=refused.reason, detail=refused.detail)
        self.index += 1

    def fire_timers(self) -> None:
        """Fire what is due, one after the other: the end of a transaction may let a segment's timer run again."""
        t0 = max(self.last_tick + 1, self.physical_ms << 18)
        while due := [timer for timer in self.timers() if timer[0] <= t0]:
            _, kind, _, timed = min(due, key=lambda timer: timer[:3])
            if kind == 0:
                self.roll_back(timed, "expired")
            else:
                policies = [policy for tick, policy in self.segment_deadlines(timed) if tick <= t0]
                self.seal(timed, "lifetime" if "lifetime" in policies else "idle")

    def timers(self) -> list[tuple[int, int, Any, Any]]:
        """(deadline, kind, id, what it ends) of each timer that runs."""
        found: list[tuple[int, int, Any, Any]] = [(self.txn_deadline(txn), 0, txn.begin, txn) for txn in self.open]
        for segment in self.segments.values():
            if segment.policy is None and not segment.txns:
                found.append((min(tick for tick, _ in self.segment_deadlines(segment)), 1, segment.id, segment))
        return found

    def txn_deadline(self, txn: Txn) -> int:
        lease = txn.renewed + (txn.keepalive_ms << 18)
        return min(lease, txn.begin_tick + (self.config["max_txn_lifetime_ms"] << 18))

    def segment_deadlines(self, segment: Segment) -> list[tuple[int, str]]:
        found = [(segment.id + (self.config["segment_lifetime_ms"] << 18), "lifetime")]
        if segment.bytes >= self.config["segment_idle_bytes"]:
            found.append((segment.last_insert + (self.config["segment_idle_ms"] << 18), "idle"))
        return found

    def judge_envelope(self, message: Msg) -> None:
        """Rules 2 to 4."""
        if message.type == T.UNDEFINED:
            raise Refused(Reason.MALFORMED)
        known = message.type in list(MessageType) and MessageType(message.type) in BEHAVIOUR
        if known and SINCE.get(MessageType(message.type), 1) > self.chain_version:
            known = False
        if not known or BEHAVIOUR[MessageType(message.type)] & Flag.EMITTED:
            raise Refused(Reason.UNSUPPORTED_TYPE)
        if message.type == T.TERM_OPENING:
            if message.term <= self.term:
                raise Refused(Reason.TERM_FENCED)
        elif not self.opened or message.term > self.term:
            raise Refused(Reason.TERM_NOT_OPENED)
        elif message.term < self.term:
            raise Refused(Reason.TERM_FENCED)
        if message.barrier_tick >> 18 > self.physical_ms + DAY_MS:
            raise Refused(Reason.MALFORMED, "barrier")
        if len(message.payload) > self.config["max_message_bytes"]:
            raise Refused(Reason.TOO_LARGE)

    def judge_producer(self, message: Msg) -> None:
        """Rule 5."""
        vchannel = self.vchannels.get(message.vchannel)
        self.in_sequence = message.producer_id != 0 and vchannel is not None
        if not self.in_sequence or vchannel is None:
            return
        known = vchannel.producers.get(message.producer_id)
        if known is None:
            if message.sequence != 0 or 0 < message.barrier_tick < vchannel.forgotten:
                raise Refused(Reason.UNKNOWN_PRODUCER)
        elif message.epoch < known.epoch:
            raise Refused(Reason.PRODUCER_FENCED)
        elif message.epoch > known.epoch:
            if message.sequence != 0:
                raise Refused(Reason.SEQUENCE_GAP)
        elif message.sequence > known.next:
            raise Refused(Reason.SEQUENCE_GAP)
        elif message.sequence < known.next:
            for results in known.runs:
                for sequence, first, tick, reason in results:
                    if sequence == message.sequence:
                        detail = f"{':'.join(map(str, first))}@{tick}" + (f" {reason}" if reason else "")
                        raise Refused(Reason.DUPLICATE, detail)
            raise Refused(Reason.ALREADY_APPLIED)

    def remember(self, message: Msg, message_id: Id, tick: int, reason: Reason | None) -> None:
        """Use up the sequence number, unless the VChannel went with the message."""
        vchannel = self.vchannels.get(message.vchannel)
        if not self.in_sequence or vchannel is None:
            return
        producers, result = vchannel.producers, (message.sequence, message_id, tick, reason)
        if message.producer_id not in producers and len(producers) >= self.config["max_producers"]:
            idlest = min(producers, key=lambda producer_id: (producers[producer_id].last_tick, producer_id))
            if self.chain_version >= 4:
                vchannel.forgotten = max(vchannel.forgotten, producers[idlest].last_tick)
            del producers[idlest]
        producer = producers.get(message.producer_id)
        if producer is None or producer.epoch != message.epoch:
            producer = producers[message.producer_id] = Producer(message.epoch, 0, 0)
        producer.next, producer.last_tick = message.sequence + 1, tick
        if producer.runs and continues(producer.runs[-1][-1], result):
            producer.runs[-1].append(result)
        else:
            producer.runs.append([result])
        del producer.runs[: -self.config["dedup_results"]]

    # -- rows -------------------------------------------------------------------------------------------------------

    def id(self) -> Id:
        return (*self.log_id, self.index, self.ordinal)

    def take_tick(self, barrier_tick: int = 0) -> int:
        self.last_tick = max(self.last_tick + 1, self.physical_ms << 18, barrier_tick + 1)
        return self.last_tick

    def accept(self, message: Msg, tick: int, *, segment_id: int = 0) -> None:
        """Record an accepted message whose effect stands already."""
        self.remember(message, self.id(), tick, None)
        confirmed = min([txn.begin for txn in self.open], default=self.id())
        self.row_since_tick = True
        self.add_row(message, tick, confirmed, segment_id=segment_id)
        self.ordinal += 1

    def emit(self, kind: T, source: Segment | Txn, tick: int, *, detail: str | None = None, **header: Any) -> None:
        message = Msg(
            kind,
            source.vchannel,
            term=self.term,
            collection_id=source.collection_id,
            payload=header.pop("payload", b""),
        )
        confirmed = min([txn.begin for txn in self.open], default=self.id())
        self.row_since_tick = True
        self.add_row(message, tick, confirmed, detail=detail, principal=None, **header)
        self.ordinal += 1

    def add_row(self, message: Msg, tick: int, confirmed: Id, *, reason: Reason | None = None, **more: Any) -> None:
        known = message.type in list(MessageType)
        if (message.type, reason) == (T.UPSERT, Reason.UNSUPPORTED_TYPE):
            known = False  # as before it had a name
        row: Row = {
            "time_tick": tick,
            **dict(zip(("ledger", "entry", "index", "ordinal"), self.id(), strict=True)),
            "physical_ms": self.physical_ms,
            "type": MessageType(message.type).name if known else T.UNDEFINED.name,
            "vchannel": message.vchannel,
            "term": message.term,
            **dict(zip(("lc_ledger", "lc_entry", "lc_index", "lc_ordinal"), confirmed, strict=True)),
            "collection_id": message.collection_id,
            "partition_id": message.partition_id,
            "segment_id": 0,
            "schema_version": message.schema_version,
            "rows": message.rows,
            "txn_id": message.txn_id,
            "producer_id": message.producer_id,
            "epoch": message.epoch,
            "sequence": message.sequence,
            "reason": None if reason is None else reason.value,
            "detail": None,
            "payload": message.payload,
            "principal": None if message.type == T.UNDEFINED else self.principal,
        }
        self.rows.append(row | more)

    # -- transactions and segments ----------------------------------------------------------------------------------

    def end_txn(self, txn: Txn, how: str) -> list[Segment]:
        """Close `txn`; returns the sealed segments that waited for it alone, to be flushed after its end's row."""
        self.open.remove(txn)
        ended = self.vchannels[txn.vchannel].ended
        ended.append((txn.txn_id, how))
        del ended[:-ENDED_REMEMBERED]
        touched = [segment for segment in self.segments.values() if txn in segment.txns]
        for segment in touched:
            segment.txns.remove(txn)
        return sorted((s for s in touched if s.policy and not s.txns), key=lambda s: s.id)

    def roll_back(self, txn: Txn, detail: str) -> None:
        released = self.end_txn(txn, "expired" if detail == "expired" else "rolled back")
        self.emit(T.ROLLBACK_TXN, txn, self.take_tick(), detail=detail, txn_id=txn.txn_id)
        for segment in released:
            self.flush(segment)

    def barrier(self, vchannel: str | None) -> None:
        """An exclusive message fails the transactions open on `vchannel` (None: on the PChannel)."""
        for txn in sorted(self.open, key=lambda txn: txn.begin):
            if vchannel in (None, txn.vchannel):
                self.roll_back(txn, "barrier")

    def growing(self, vchannel: str, partition_id: int = 0) -> list[Segment]:
        """The growing segments of a VChannel and partition (0: all), by id."""
        found = (s for s in self.segments.values() if s.policy is None)
        found = (s for s in found if vchannel == s.vchannel and partition_id in (0, s.partition_id))
        return sorted(found, key=lambda segment: segment.id)

    def seal(self, segment: Segment, policy: str) -> None:
        self.seal_all([(segment, policy)])

    def seal_all(self, found: list[tuple[Segment, str]]) -> None:
        """Seal segments for one reason each; those that wait for nothing are flushed in the order of their ids."""
        for segment, policy in found:
            segment.policy = policy
        for segment in sorted((each for each, _ in found), key=lambda each: each.id):
            if not segment.txns:
                self.flush(segment)

    def flush(self, segment: Segment) -> None:
        del self.segments[segment.id]
        tick = self.take_tick()
        self.vchannels[segment.vchannel].mvcc = tick
        payload = json.dumps({"policy": segment.policy}).encode()
        header: dict[str, Any] = {"partition_id": segment.partition_id, "segment_id": segment.id, "rows": segment.rows}
        self.emit(T.FLUSH, segment, tick, payload=payload, **header)

    def txn_of(self, message: Msg) -> Txn:
        """The open transaction that `message` belongs to."""
        for txn in self.open:
            if (txn.vchannel, txn.txn_id) == (message.vchannel, message.txn_id):
                return txn
        vchannel = self.vchannels.get(message.vchannel)
        for txn_id, how in reversed(vchannel.ended if vchannel else []):
            if txn_id == message.txn_id:
                raise Refused(Reason.TXN_EXPIRED if how == "expired" else Reason.TXN_NOT_ACTIVE)
        raise Refused(Reason.TXN_NOT_FOUND)

    def collection(self, message: Msg) -> VChannel:
        vchannel = self.vchannels.get(message.vchannel)
        if vchannel is None or vchannel.collection_id != message.collection_id:
            raise Refused(Reason.COLLECTION_NOT_FOUND)
        return vchannel
