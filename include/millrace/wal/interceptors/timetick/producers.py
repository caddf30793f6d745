"""Idempotent producers (law 8): per VChannel and producer, a retried sequence has one effect and gets the first result.

docs/chain.md, "Producers". A duplicate gets a stored result. So a run is cut before a duplicate that follows new
messages of the same producer: it is judged once their results are in the state.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np
import numpy.typing as npt

from millrace.wal.message_run import ACCEPTED, REASONS, DecidedBatch, DecidedMessage, MessageRun, group_indices
from millrace.wal.reasons import SEQUENCE_NEUTRAL_REASONS, Reason
from millrace.wal.state import ChannelState, ProducerState, SequenceResult, VChannelState
from millrace.wal.versions import VERSION_4

_USES_SEQUENCE: Final = np.array([True, *(reason not in SEQUENCE_NEUTRAL_REASONS for reason in REASONS)])
"""For each reason code, whether the verdict uses up the sequence number."""


class _IdleMeasure:
    """Finds the producer that was idle longest: its last tick and id. The id breaks ties: replays must agree."""

    def of(self, producer_id: int, producer: ProducerState, context: None) -> tuple[int, int]:
        return producer.last_tick, producer_id

    def same(self, old: ProducerState, new: ProducerState) -> bool:
        return old is new

    def join(self, idle: list[tuple[int, int]]) -> tuple[int, int]:
        return min(idle)


_IDLE: Final = _IdleMeasure()


def judge(state: ChannelState, run: MessageRun) -> None:
    """Reject duplicates, gaps, and unknown or fenced producers. May cut the run."""
    columns = run.columns
    pending = run.pending()
    mine = pending[run.view(columns.producer_id)[pending] != 0]
    if not len(mine):
        return
    found: list[tuple[VChannelState, npt.NDArray[np.intp]]] = []
    unknown: defaultdict[str, list[int]] = defaultdict(list)  # by VChannel the first row of each
    for places in group_indices(run.view(columns.vchannel)[mine], run.view(columns.producer_id)[mine]):
        rows = mine[places]
        channel = state.vchannels.get(columns.vchannel_name(run.start + int(rows[0])))
        if channel is not None:
            found.append((channel, rows))
            if int(columns.producer_id[run.start + rows[0]]) not in channel.producers:
                unknown[channel.name].append(int(rows[0]))
    most = state.config.max_producers
    forgotten = {}
    for name, first in unknown.items():
        channel, first = state.vchannels[name], sorted(row for row in first if row < run.count)
        if run.count > 1 and len(channel.producers) + len(first) > most:
            forgotten[name] = _cut_for_room(channel, run, first, most)
    for channel, rows in found:
        # An earlier producer of this loop, or the lack of room, may have cut the run.
        rows = rows[rows < run.count]
        if len(rows):
            _judge_producer(channel, run, rows, forgotten=forgotten.get(channel.name, channel.forgotten))


def _cut_for_room(channel: VChannelState, run: MessageRun, unknown: list[int], most: int) -> int:
    """Cut a run that registers producers beyond the limit, so that none of them evicts a producer of the run.

    `unknown` are the first messages of producers that the channel does not know. Returns the greatest tick of a
    producer that may be forgotten inside the run.
    """
    ids, names = run.view(run.columns.producer_id), run.view(run.columns.vchannel)
    mine = set(ids[names == names[unknown[0]]].tolist())
    # The idlest are evicted first. A producer of the run is not among them as long as others are idler: its own
    # messages make it busier, and those that the run registers are the busiest.
    idle = sorted((producer.last_tick, number) for number, producer in channel.producers.items())
    safe = next((place for place, (_, number) in enumerate(idle) if number in mine), len(idle))
    room = max(0, most - len(channel.producers)) + safe
    if len(unknown) > room:
        run.cut(max(1, unknown[room]))
    evicted = min(len(unknown), room) + len(channel.producers) - most
    return max(channel.forgotten, idle[evicted - 1][0] if 0 < evicted <= len(idle) else 0)


def _judge_producer(channel: VChannelState, run: MessageRun, rows: npt.NDArray[np.intp], *, forgotten: int) -> None:
    """Judge the messages of one producer on a VChannel. Producers up to `forgotten` may be forgotten inside the run."""
    columns = run.columns
    producer_id = int(columns.producer_id[run.start + rows[0]])
    known = channel.producers.get(producer_id)
    epochs, sequences = run.view(columns.epoch)[rows], run.view(columns.sequence)[rows]
    # The common case, without a loop over rows: the next sequences of a known producer.
    if known and (epochs == known.epoch).all() and (sequences == known.next_sequence + np.arange(len(rows))).all():
        return
    epoch, following = (known.epoch, known.next_sequence) if known else (-1, 0)
    fresh = False
    for place, e, s in zip(rows.tolist(), epochs.tolist(), sequences.tolist(), strict=True):
        if epoch == -1:
            if s != 0:
                run.reject(
                    place, Reason.UNKNOWN_PRODUCER, f"producer {producer_id} must begin with sequence 0, not {s}"
                )
                continue
            barrier = columns.barrier_tick[run.start + place]
            if place > 0 and forgotten > channel.forgotten and 0 < barrier < forgotten:
                run.cut(place)  # the verdict and its words depend on what the run before it evicts
                return
            if 0 < barrier < channel.forgotten:
                words = f"producers up to tick {channel.forgotten} were forgotten, {producer_id} perhaps among them"
                run.reject(
                    place, Reason.UNKNOWN_PRODUCER, f"{words}: begin with that as the barrier tick, or a later one"
                )
                continue
            epoch, following, fresh = e, 1, True
        elif e < epoch:
            run.reject(place, Reason.PRODUCER_FENCED, f"producer {producer_id} runs epoch {epoch}; this is epoch {e}")
        elif e > epoch:
            if s != 0:
                run.reject(place, Reason.SEQUENCE_GAP, f"epoch {e} must begin with sequence 0, not {s}")
                continue
            epoch, following, fresh = e, 1, True
        elif s == following:
            following, fresh = following + 1, True
        elif s > following:
            run.reject(place, Reason.SEQUENCE_GAP, f"sequence {following} comes next, not {s}")
        elif fresh:
            run.cut(place)
            return
        else:
            # Only a known producer has used sequences before the next one.
            assert known is not None
            _reject_repeated(run, place, known, s)


def _reject_repeated(run: MessageRun, place: int, producer: ProducerState, sequence: int) -> None:
    result = producer.result(sequence)
    if result is None:
        run.reject(place, Reason.ALREADY_APPLIED, f"sequence {sequence} was applied; its result is no longer kept")
        return
    message_id, tick, reason = result
    run.reject(place, Reason.DUPLICATE, f"{message_id}@{tick} {reason}".rstrip())


def evolve(state: ChannelState, rows: DecidedBatch) -> None:
    """Record the sequences that `rows` used up, with their results."""
    mine = np.flatnonzero((rows.producer_id != 0) & _USES_SEQUENCE[rows.reason])
    for stretch in _stretches(state, rows, mine):
        for places in group_indices(rows.vchannel[stretch], rows.producer_id[stretch]):
            each = stretch[places]
            channel = state.vchannels.get(rows.names[rows.vchannel[each[0]]])
            if channel is None:
                continue
            for part in np.split(each, np.flatnonzero(np.diff(rows.epoch[each])) + 1):
                channel = _evolve_part(state, channel, rows, part)
            state.put(channel)


def _stretches(state: ChannelState, rows: DecidedBatch, mine: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Split `mine` so that each part may be applied producer by producer.

    The producer that a registration evicts depends on all rows before it and none after it. Judging has cut its runs
    there (`_judge_producer`); a replay has slices over many runs.
    """
    beginning = np.flatnonzero(rows.sequence[mine] == 0)
    most = state.config.max_producers
    for places in group_indices(rows.vchannel[mine[beginning]]):
        first = mine[beginning[places]]
        channel = state.vchannels.get(rows.names[rows.vchannel[first[0]]])
        if channel is None or len(channel.producers) + len(first) <= most:
            continue
        unknown = set(rows.producer_id[first].tolist()) - channel.producers.keys()
        if len(channel.producers) + len(unknown) > most:
            return [each for each in np.split(mine, np.union1d(beginning, beginning + 1)) if len(each)]
    return [mine] if len(mine) else []


def _evolve_part(
    state: ChannelState, channel: VChannelState, rows: DecidedBatch, part: npt.NDArray[np.intp]
) -> VChannelState:
    clean = rows.reason[part] == ACCEPTED
    index = rows.index[part].astype(np.int64)
    joined = (
        (np.diff(rows.sequence[part]) == 1)
        & (np.diff(rows.ledger[part]) == 0)
        & (np.diff(rows.entry[part]) == 0)
        & (np.diff(index) == 1)
        & (np.diff(rows.ordinal[part]) == 0)
        & (np.diff(rows.tick[part]) == 1)
        & clean[1:]
        & clean[:-1]
    )
    starts = np.flatnonzero(np.concatenate([[True], ~joined]))
    counts = np.diff(np.append(starts, len(part)))
    results = [
        SequenceResult(
            int(rows.sequence[row]),
            int(count),
            int(rows.ledger[row]),
            int(rows.entry[row]),
            int(rows.index[row]),
            int(rows.ordinal[row]),
            int(rows.tick[row]),
            REASONS[rows.reason[row] - 1].value if rows.reason[row] else "",
        )
        for row, count in zip(part[starts].tolist(), counts.tolist(), strict=True)
    ]
    last = part[-1]
    return _recorded(
        state,
        channel,
        int(rows.producer_id[last]),
        int(rows.epoch[last]),
        int(rows.sequence[last]) + 1,
        int(rows.tick[last]),
        results,
    )


def evolve_one(state: ChannelState, channel: VChannelState, row: DecidedMessage) -> VChannelState:
    """Return `channel` with the sequence of one accepted message recorded."""
    result = SequenceResult(row.sequence, 1, row.ledger, row.entry, row.index, row.ordinal, row.tick, "")
    return _recorded(state, channel, row.producer_id, row.epoch, row.sequence + 1, row.tick, [result])


def _recorded(
    state: ChannelState,
    channel: VChannelState,
    producer_id: int,
    epoch: int,
    following: int,
    tick: int,
    results: list[SequenceResult],
) -> VChannelState:
    producers, forgotten = channel.producers, channel.forgotten
    known = producers.get(producer_id)
    if known is None and len(producers) >= state.config.max_producers:
        last_tick, idle = producers.summary(_IDLE, None)
        producers = producers.without(idle)
        if state.chain_version >= VERSION_4:
            # From here on a producer that may be the forgotten one has to say that it began later (its barrier tick).
            forgotten = max(forgotten, last_tick)
    known_results = known.results if known and known.epoch == epoch else ()
    # Results of consecutive sequences are one run in the state, so that dedup_results bounds runs, not messages.
    if known_results and results and _continues(known_results[-1], results[0]):
        results = [known_results[-1]._replace(length=known_results[-1].length + results[0].length), *results[1:]]
        known_results = known_results[:-1]
    recorded = ProducerState(epoch, following, tick, (*known_results, *results)[-state.config.dedup_results :])
    return channel._replace(producers=producers.set(producer_id, recorded), forgotten=forgotten)


def _continues(run: SequenceResult, following: SequenceResult) -> bool:
    """Return whether `following` is the result that would follow `run`."""
    n = run.length
    return not run.reason and following == following._replace(
        sequence=run.sequence + n,
        ledger=run.ledger,
        entry=run.entry,
        first_index=run.first_index + n,
        ordinal=run.ordinal,
        tick=run.tick + n,
        reason="",
    )
