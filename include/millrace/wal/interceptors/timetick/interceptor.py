"""Timetick: terms, message headers, idempotent producers and timers. Stamps accepted messages with their time ticks.

A time tick is ``max(last + 1, physical_ms << 18, barrier + 1)``: the log's own append stamp, made strictly increasing.
docs/chain.md, "A message's way".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.base.errors import Malformed, UnsupportedVersion
from millrace.message.bodies import check_schema_change_before_v4, parse_body
from millrace.message.field_types import TYPES_BEFORE_V4
from millrace.message.ids import LOGICAL_BITS, LogId, generation_start
from millrace.message.schema import KEY_TYPES_BEFORE_V4, CollectionSchema, FieldSpec
from millrace.message.schema_changes import AddField
from millrace.message.types import DML, MIN_CHAIN_VERSION, Flag, MessageType, flags_of
from millrace.wal.interceptors.interceptor import Proceed
from millrace.wal.interceptors.timetick import producers
from millrace.wal.interceptors.txn.interceptor import TXN_TYPES
from millrace.wal.message_run import ACCEPTED, DecidedBatch, DecidedMessage, Int64s, MessageRun, group_indices
from millrace.wal.reasons import Reason
from millrace.wal.state import ChannelState
from millrace.wal.versions import CHAIN_VERSIONS, VERSION_4

MAX_BARRIER_AHEAD_MS = 86_400_000

_ALWAYS = frozenset({MessageType.INSERT, MessageType.DELETE})


class TimeTickInterceptor:
    """Between lock and shard."""

    name = "timetick"

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        # This order is part of the chain version: a message keeps its first rejection.
        self._cut_before_timers(state, run)
        self._judge_types(state, run)
        self._judge_terms(state, run)
        self._judge_headers(state, run)
        producers.judge(state, run)
        if run.first_accepted:
            self._judge_own(state, run)
        proceed(run)

    def _cut_before_timers(self, state: ChannelState, run: MessageRun) -> None:
        """Cut the run before any timer is due: one that is set now or that the run itself can set."""
        if run.count == 1:
            return
        columns = run.columns
        wanted = np.maximum(run.view(columns.physical_ms) << LOGICAL_BITS, run.view(columns.barrier_tick) + 1)
        ticks = strictly_increasing(wanted, state.last_tick)
        config = state.config
        shortest = min(config.segment_idle_ms, config.segment_lifetime_ms) << LOGICAL_BITS
        # A segment that the run itself creates is idle or too old after the shorter of the two bounds at the earliest.
        deadline = min(state.next_deadline(), int(ticks[0]) + shortest)
        if ticks[-1] >= deadline:
            run.cut(int(np.searchsorted(ticks, deadline)))

    def _judge_types(self, state: ChannelState, run: MessageRun) -> None:
        number = int(run.columns.type[run.start])
        if number in _ALWAYS:
            return
        flags = flags_of(number)
        if flags is not None and MIN_CHAIN_VERSION.get(MessageType(number), 1) > state.chain_version:
            flags = None
        if number == MessageType.UNDEFINED:
            words = run.columns.details.get(run.start)
            run.reject(0, Reason.MALFORMED, words or "type 0 (UNDEFINED) is no message")
        elif flags is None:
            run.reject(
                0, Reason.UNSUPPORTED_TYPE, f"message type {number} has no behaviour in this version of Millrace"
            )
        elif Flag.EMITTED in flags:
            run.reject(0, Reason.UNSUPPORTED_TYPE, f"{MessageType(number).name} is made by the chain alone")

    def _judge_terms(self, state: ChannelState, run: MessageRun) -> None:
        pending = run.pending()
        term = run.view(run.columns.term)[pending]
        if run.columns.type[run.start] == MessageType.TERM_OPENING:
            if len(pending) and term[0] <= state.term:
                run.reject(0, Reason.TERM_FENCED, f"term {term[0]} cannot open: term {state.term} is open")
            return
        if state.term == 0:
            run.reject(pending, Reason.TERM_NOT_OPENED, "no term was opened on this PChannel yet")
            return
        older, newer = pending[term < state.term], pending[term > state.term]
        if len(older):
            run.reject(older, Reason.TERM_FENCED, f"term {state.term} is open; ask for the assignment and append again")
        if len(newer):
            run.reject(newer, Reason.TERM_NOT_OPENED, f"term {state.term} is open; the message is of a later one")

    def _judge_headers(self, state: ChannelState, run: MessageRun) -> None:
        columns = run.columns
        pending = run.pending()
        ahead = run.view(columns.physical_ms)[pending] + MAX_BARRIER_AHEAD_MS
        far = pending[(run.view(columns.barrier_tick)[pending] >> LOGICAL_BITS) > ahead]
        if len(far):
            run.reject(far, Reason.MALFORMED, "the barrier tick lies more than 24 h ahead of the log")
        pending = run.pending()
        big = pending[run.view(columns.size)[pending] > state.config.max_message_bytes]
        if len(big):
            run.reject(big, Reason.TOO_LARGE, f"a payload has at most {state.config.max_message_bytes} bytes; split it")

    def _judge_own(self, state: ChannelState, run: MessageRun) -> None:
        """Check a control message's body by its type, then the rules of TimeTick, TermOpening and Config."""
        columns, row = run.columns, run.start
        number = int(columns.type[row])
        if number in DML:
            return
        try:
            if number == MessageType.SCHEMA_CHANGE and state.chain_version < VERSION_4:
                check_schema_change_before_v4(columns.payload(row))
            body = parse_body(MessageType(number), columns.payload(row))
            if number == MessageType.TERM_OPENING:
                state.config.with_changes(body["config"])
            elif number == MessageType.CONFIG:
                state.config.with_changes(body)
            elif state.chain_version < VERSION_4:
                _check_first_types(number, body)
        except Malformed as error:
            run.reject(0, Reason.MALFORMED, str(error))
            return
        if number == MessageType.TIME_TICK:
            run.persisted = state.dirty
        if number == MessageType.TERM_OPENING and body["chain_version"] not in CHAIN_VERSIONS:
            raise UnsupportedVersion(
                f"term {columns.term[row]} of {state.pchannel} runs chain version {body['chain_version']},"
                f" this host has versions {CHAIN_VERSIONS}: run the build that opened the term, or a newer one"
            )
        if number == MessageType.ALTER_WAL:
            self._judge_alter_wal(run, body["generation"])

    def _judge_alter_wal(self, run: MessageRun, generation: int) -> None:
        """Check that AlterWAL is the last message of its entry and names the next generation."""
        columns, row = run.columns, run.start
        here = LogId(int(columns.ledger[row]), int(columns.entry[row]))
        if columns.vchannel_name(row):
            run.reject(0, Reason.MALFORMED, "AlterWAL goes to the whole PChannel: its VChannel is empty")
        elif row + 1 < len(columns) and (columns.ledger[row + 1], columns.entry[row + 1]) == here:
            run.reject(0, Reason.MALFORMED, "AlterWAL is the last message of its entry")
        elif generation != here.generation + 1:
            words = f"the log is in generation {here.generation}: generation {generation} is not the next one"
            run.reject(0, Reason.NO_EFFECT, words)

    def stamp(self, state: ChannelState, run: MessageRun) -> None:
        """Set the ticks of the run: of an accepted message its own, of a rejection the last one before it."""
        columns = run.columns
        if run.count == 1:
            # A single message takes this short way; it must give what the columns below give.
            own = max(state.next_tick(int(columns.physical_ms[run.start])), int(columns.barrier_tick[run.start]) + 1)
            run.tick = np.array([own if run.first_accepted else state.last_tick])
            return
        accepted = run.reason == ACCEPTED
        wanted = np.maximum(run.view(columns.physical_ms) << LOGICAL_BITS, run.view(columns.barrier_tick) + 1)[accepted]
        ticks = np.full(run.count, state.last_tick, dtype=np.int64)
        ticks[accepted] = strictly_increasing(wanted, state.last_tick)
        # A rejection has the tick of the last accepted message before it, so that ticks never decrease in a run.
        run.tick = np.maximum.accumulate(ticks)

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        accepted = rows.reason == ACCEPTED
        if accepted.any():
            state.last_tick = int(rows.tick[accepted][-1])
            state.dirty = True
            visible = accepted & (rows.txn_id == 0)
            for places in group_indices(rows.vchannel[visible]):
                last = np.flatnonzero(visible)[places[-1]]
                channel = state.vchannels[rows.names[rows.vchannel[last]]]
                state.put(channel._replace(mvcc=int(rows.tick[last])))
        producers.evolve(state, rows)

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        state.last_tick = row.tick
        state.dirty = row.type is not MessageType.TIME_TICK
        if row.type is MessageType.TERM_OPENING:
            body = parse_body(row.type, row.payload)
            state.term, state.chain_version = row.term, body["chain_version"]
            state.config = state.config.with_changes(body["config"])
        elif row.type is MessageType.CONFIG:
            state.config = state.config.with_changes(parse_body(row.type, row.payload))
        elif row.type is MessageType.ALTER_WAL:
            # AlterWAL ends the log of its generation: whatever follows it there is never read.
            state.position = generation_start(LogId(row.ledger, row.entry).generation + 1)
        channel = state.vchannels.get(row.vchannel)
        # An emitted CreateSegment shows nothing to readers, and no producer sent it.
        if channel is None or row.type is MessageType.CREATE_SEGMENT:
            return
        hidden = row.txn_id if row.type in DML else row.type in TXN_TYPES and row.type is not MessageType.COMMIT_TXN
        after = channel if hidden else channel._replace(mvcc=row.tick)
        # A CreateCollection uses no sequence: its VChannel had no collection when it was judged.
        if row.producer_id and row.type is not MessageType.CREATE_COLLECTION:
            after = producers.evolve_one(state, after, row)
        if after is not channel:
            state.put(after)


def _check_first_types(number: int, body: Any) -> None:
    """Raise Malformed for a field type, or an option of a collection, that chains before version 4 do not know."""
    fields: tuple[FieldSpec, ...] = ()
    if number == MessageType.CREATE_COLLECTION:
        fields = body["schema"].fields
        schema: CollectionSchema = body["schema"]
        if schema.replaces_duplicates or schema.checks:
            raise Malformed("a schema is an object with fields, primary_key and, perhaps, event_time")
        if len(schema.key_names) > 1 or schema.key_fields[0].type not in KEY_TYPES_BEFORE_V4:
            raise Malformed("the primary key is one field of type int64 or string")
    elif number == MessageType.SCHEMA_CHANGE:
        fields = tuple(each.field for each in body["changes"] if isinstance(each, AddField))
    for field in fields:
        if field.default is not None or field.computed is not None:
            raise Malformed("a field is an object with name, type and nullable")
        if field.type not in TYPES_BEFORE_V4:
            raise Malformed(f"field {field.name!r}: unknown type {field.type!r}; one of {', '.join(TYPES_BEFORE_V4)}")


def strictly_increasing(wanted: Int64s, last: int) -> Int64s:
    """Return the least ticks with tick[i] >= wanted[i] and tick[i] > tick[i - 1], the first above `last`."""
    steps = np.arange(len(wanted), dtype=np.int64)
    # tick[i] - i never decreases exactly if ticks strictly increase: so a running maximum gives the least ticks.
    lowest = wanted - steps
    if len(lowest):
        lowest[0] = max(int(lowest[0]), last + 1)
    result: Int64s = np.maximum.accumulate(lowest) + steps
    return result
