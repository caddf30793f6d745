"""The chain: a pure function of (channel state, log range), which every host and every recovery calls.

``Chain().process`` decides and evolves. :func:`replay` only evolves, over rows that were decided before. Nothing here
reads a clock, draws a random number or knows a host. docs/chain.md is the specification; tests/laws/ checks it against
a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Final

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.message.columns import MessageColumns
from millrace.message.header import HEADER
from millrace.message.ids import GENERATION_BITS, LogId, MessageId
from millrace.message.log_entries import LogEntries
from millrace.message.types import DML, MessageType
from millrace.message.wire.decode import decode_columns, entry_crc
from millrace.wal.fast_path import accept_plain
from millrace.wal.interceptors.interceptor import DeferredEmitter, Emitter, Interceptor, Proceed, Stamper, TimerSource
from millrace.wal.interceptors.lock.interceptor import LockInterceptor
from millrace.wal.interceptors.redo.interceptor import RedoInterceptor
from millrace.wal.interceptors.shard.interceptor import ShardInterceptor
from millrace.wal.interceptors.timetick.interceptor import TimeTickInterceptor
from millrace.wal.interceptors.txn.interceptor import TxnManager
from millrace.wal.message_run import ACCEPTED, MAX_RUN, MIN_RUN, DecidedBatch, DecidedMessage, Emission, MessageRun
from millrace.wal.rows import WalRowBuilder, iter_decided, rows_of_accepted
from millrace.wal.state import ChannelState
from millrace.wal.versions import CHAIN_VERSION, CHAIN_VERSIONS

__all__ = ["CHAIN_VERSION", "CHAIN_VERSIONS", "Chain", "ChainOutcome", "replay"]

_header: Final = attrgetter(*HEADER)

_GROWTH: Final = 8
"""A step looks at this many times the number of messages that the last step judged."""


@dataclass(frozen=True)
class ChainOutcome:
    """The chain's result for a run of entries. `state` is the state after the run."""

    state: ChannelState
    build: Callable[[], tuple[pa.RecordBatch, pa.RecordBatch]]
    """Builds messages and rejections; called once, by the first to ask for them."""
    plain: Sequence[DecidedMessage] | None = None
    """The accepted messages of a run in which there is nothing else, if they were judged one by one."""

    @property
    def messages(self) -> pa.RecordBatch:
        """The accepted and emitted messages as a batch of ROW_SCHEMA, in id order."""
        return self._rows[0]

    @property
    def rejections(self) -> pa.RecordBatch:
        """The rejections as a batch of ROW_SCHEMA, in id order."""
        return self._rows[1]

    @property
    def accepted(self) -> int:
        """Number of accepted and emitted messages."""
        return self.messages.num_rows if self.plain is None else len(self.plain)

    @cached_property
    def _rows(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        return self.build()


class Chain:
    """The chain redo → lock → timetick (with the transaction manager) → shard. Stateless: PChannels may share one."""

    def __init__(
        self,
        *,
        wrap: Callable[[Interceptor], Interceptor] = lambda link: link,
        max_run: int = MAX_RUN,
        fast: bool = True,
    ) -> None:
        """Build the interceptors.

        `wrap` may replace each interceptor by an observing one. A step judges at most `max_run` messages. With `fast`,
        a few plain messages are judged without the interceptors (millrace.wal.fast_path), to the same effect.
        """
        self._max_run = max_run
        self._fast = fast
        own = build_interceptors()
        self._links = tuple(map(wrap, own))
        self._inside_out = own[::-1]
        self._timed = [link for link in own if isinstance(link, TimerSource)]
        self._emitting = [link for link in own if isinstance(link, Emitter)]
        self._stamping = [link for link in own if isinstance(link, Stamper)]
        self._settling = [link for link in own if isinstance(link, DeferredEmitter)]

    def process(self, state: ChannelState, entries: LogEntries) -> ChainOutcome:
        """Judge `entries`, which must start at ``state.position``. Does not modify `state`.

        Raises UnsupportedVersion if the log needs another version of the wire form or the chain. Any other content
        becomes rows. Entries of a generation that an AlterWAL message ended are outside the log: they are skipped,
        whether they arrive with it or later, and `state.position` is in the next generation.
        """
        batch = entries.batch
        # The log has moved to another backend: what was written to the old one after the AlterWAL message is outside
        # the log.
        outside = _before(batch, state.position.generation)
        batch = batch.slice(outside) if outside else batch
        accepted = accept_plain(state, batch, self._evolve_plain) if self._fast else None
        if accepted is not None:
            after = accepted.state
            confirmed = after.first_open_begin()
            after.position = max(after.position, entries.next)
            rows = partial(rows_of_accepted, batch, accepted.messages, confirmed)
            return ChainOutcome(after, rows, accepted.messages)
        columns = decode_columns(batch)
        if batch.num_rows and _id(columns, 0) < state.position:
            raise InvalidArgument(
                f"entries begin before {state.position}, the position of the state of {state.pchannel}"
            )
        state = state.copy()
        builder = WalRowBuilder(columns)
        row, last, most = 0, len(columns) - 1, self._max_run
        while row < len(columns):
            begun, row = row, self._step(state, columns, row, builder, most)
            # A step looks at as many messages as the last one judged, and some more. Otherwise many messages that are
            # judged alone would cost quadratic time.
            most = min(self._max_run, max(MIN_RUN, (row - begun) * _GROWTH))
            # The message just judged was an AlterWAL: skip the rest of its generation.
            if columns.ledger[row - 1] >> GENERATION_BITS < state.position.generation:
                ended = row - 1
                row = int(np.searchsorted(columns.ledger, state.position.ledger))
                last = ended if row == len(columns) else last
        state.position = max(state.position, entries.next)
        if batch.num_rows:
            state.last_entry = _id(columns, last)
            value = batch.column("value")[_place(batch, state.last_entry)]
            # An entry that did not decode is one row of type 0.
            state.last_entry_crc = entry_crc(value.as_buffer(), verified=columns.type[last] != MessageType.UNDEFINED)
        return ChainOutcome(state, builder.build)

    def _step(self, state: ChannelState, columns: MessageColumns, row: int, rows: WalRowBuilder, most: int) -> int:
        """Process messages from `row` that can be judged together, at most `most`. Returns the next row."""
        ordinal = 0
        # Timers run on log time. They fire before the message that brings their time, so every host emits them at the
        # same place.
        now = state.next_tick(int(columns.physical_ms[row]))
        while state.term and (emission := self._due(state, now)) is not None:
            ordinal = self._emit(state, columns, row, rows, emission, ordinal)
        # At most `most` messages; an interceptor cuts the run where one message could influence a later one.
        run = MessageRun.of(columns, row, most=most)
        if ordinal:
            run.cut(1)
        self.decide(state, run)
        # Emissions that the run needs (a CreateSegment) take effect, and a tick, before the run itself is stamped.
        before = [emission for link in self._emitting for emission in link.emissions(state, run)]
        for emission in before:
            ordinal = self._emit(state, columns, row, rows, emission, ordinal)
        for link in self._stamping:
            link.stamp(state, run)
        if not run.persisted:
            # A tick message without messages before it leaves no row, but its tick counts.
            state.last_tick = int(run.tick[0])
            return row + 1
        self._evolve_run(state, run, ordinal)
        rows.add_run(run, ordinal=ordinal, confirmed=state.first_open_begin())
        last = row + run.count - 1
        ordinal = ordinal + 1 if run.count == 1 else 1
        if run.reason[-1] == ACCEPTED:
            self._settle(state, columns, last, rows, ordinal)
        return last + 1

    def _due(self, state: ChannelState, tick: int) -> Emission | None:
        """Return the emission of the first timer with a deadline <= `tick`; None if none is due."""
        # The state caches its earliest deadline: without a due timer this costs one comparison.
        if state.next_deadline() > tick:
            return None
        timers = [
            (timer.deadline, place, timer.emission)
            for place, link in enumerate(self._timed)
            if (timer := link.first_timer(state, tick)) is not None
        ]
        # A total order over deadline, interceptor and id: every host fires timers in the same sequence.
        return min(timers, key=lambda timer: timer[:2])[2]

    def decide(self, state: ChannelState, run: MessageRun) -> None:
        """Let every interceptor judge `run`, outermost first. Modifies only the run."""

        def after(number: int) -> Proceed:
            if number == len(self._links):
                return lambda run: None
            return lambda run: self._links[number].decide(state, run, after(number + 1))

        after(0)(run)

    def evolve(self, state: ChannelState, rows: DecidedBatch | DecidedMessage) -> None:
        """Apply decided messages to `state`, innermost interceptor first."""
        for link in reversed(self._links):
            if isinstance(rows, DecidedMessage):
                link.evolve_one(state, rows)
            else:
                link.evolve(state, rows)

    def _evolve_plain(self, state: ChannelState, message: DecidedMessage) -> None:
        """Run :meth:`evolve` without measuring each interceptor, which would cost more than its work here."""
        for link in self._inside_out:
            link.evolve_one(state, message)

    def _evolve_run(self, state: ChannelState, run: MessageRun, ordinal: int) -> None:
        columns, row = run.columns, run.start
        if run.count == 1 and run.first_accepted:
            self.evolve(state, _row(run, ordinal))
            return
        ordinals = np.zeros(run.count, dtype=np.int32)
        ordinals[0] = ordinal
        self.evolve(
            state,
            DecidedBatch(
                **(columns.slice_arrays(row, row + run.count) | {"type": run.type}),
                tick=run.tick,
                ordinal=ordinals,
                segment_id=run.segment,
                reason=run.reason,
            ),
        )

    def _emit(
        self,
        state: ChannelState,
        columns: MessageColumns,
        cause: int,
        rows: WalRowBuilder,
        emission: Emission,
        ordinal: int,
    ) -> int:
        """Give `emission` its tick and ordinal, apply it and what it releases. Returns the next ordinal."""
        tick = state.next_tick(int(columns.physical_ms[cause]))
        self.evolve(state, _emitted_row(columns, cause, emission, tick, ordinal, state.term))
        confirmed = state.first_open_begin()
        rows.add_emitted(emission, cause=cause, ordinal=ordinal, tick=tick, term=state.term, confirmed=confirmed)
        # An emission may release another one, such as the Flush of a segment that it sealed.
        return self._settle(state, columns, cause, rows, ordinal + 1)

    def _settle(
        self, state: ChannelState, columns: MessageColumns, cause: int, rows: WalRowBuilder, ordinal: int
    ) -> int:
        """Emit what waits for nothing more (flushes of sealed segments). Returns the next ordinal."""
        for link in self._settling:
            emission = link.ready_emission(state)
            if emission is not None:
                return self._emit(state, columns, cause, rows, emission, ordinal)
        return ordinal


def _id(columns: MessageColumns, row: int) -> LogId:
    return LogId(int(columns.ledger[row]), int(columns.entry[row]))


def _place(batch: pa.RecordBatch, entry: LogId) -> int:
    """Return the index of `entry` in `batch`: usually near its end."""
    ledger, number = batch.column("ledger").to_numpy(), batch.column("entry").to_numpy()
    return next(place for place in range(len(number) - 1, -1, -1) if (ledger[place], number[place]) == entry)


def _before(batch: pa.RecordBatch, generation: int) -> int:
    """Return the number of entries in `batch` of generations before `generation`."""
    if not generation or not batch.num_rows:
        return 0
    return int(np.searchsorted(batch["ledger"].to_numpy(), generation << GENERATION_BITS))


def _row(run: MessageRun, ordinal: int) -> DecidedMessage:
    """Return the run's only message, accepted and stamped."""
    columns, row, message_type = run.columns, run.start, MessageType(int(run.type[0]))
    # The state stores nothing of the payload of rows, so it is not copied.
    payload = b"" if message_type in DML else columns.payload(row)
    stamps = (int(run.tick[0]), ordinal, int(run.segment[0]), int(columns.size[row]), None, payload)
    values: tuple[Any, ...] = (message_type, columns.vchannel_name(row), *columns.header_numbers(row), *stamps)
    return DecidedMessage(*values)


def _emitted_row(
    columns: MessageColumns, cause: int, emission: Emission, tick: int, ordinal: int, term: int
) -> DecidedMessage:
    kind, vchannel, _, *others = _header(emission)
    place = (int(columns.ledger[cause]), int(columns.entry[cause]), int(columns.index[cause]))
    # A segment's id is the tick of its CreateSegment: unique without a counter.
    segment_id = tick if kind is MessageType.CREATE_SEGMENT else emission.segment_id
    stamps = (tick, ordinal, segment_id, len(emission.payload), emission.detail, emission.payload)
    values: tuple[Any, ...] = (kind, vchannel, term, *others, *place, *stamps)
    return DecidedMessage(*values)


def replay(
    state: ChannelState,
    rows: pa.Table,
    *,
    position: LogId,
    last_tick: int,
    last_entry: LogId | None,
    last_entry_crc: int,
) -> ChannelState:
    """Return the state at `position` by evolving an earlier state over the decided rows between them.

    `rows` are messages and rejections of ROW_SCHEMA in id order (:func:`millrace.wal.rows.rows_in_order`). The other
    arguments hold what rows do not tell (a time tick without a row, the bytes of the last entry), from the WAL's state
    rows.
    """
    chain = Chain()
    state = state.copy()
    for part in iter_decided(rows):
        chain.evolve(state, part)
    state.position, state.last_entry, state.last_entry_crc = position, last_entry, last_entry_crc
    # Ticks without a row are in the WAL's state rows only.
    state.last_tick = max(state.last_tick, last_tick)
    return state


def last_confirmed(state: ChannelState) -> MessageId:
    """Return LastConfirmed after `state`: a reader that starts there misses nothing that becomes visible later."""
    begin = state.first_open_begin()
    return begin if begin is not None else MessageId(*state.position, 0, 0)


def build_interceptors() -> tuple[Interceptor, ...]:
    """Return the interceptors of a chain, outermost first."""
    txns = TxnManager()
    return RedoInterceptor(), LockInterceptor(), TimeTickInterceptor(), txns, ShardInterceptor(txns)
