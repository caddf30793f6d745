"""Segments of a VChannel: growing, sealed by a policy, flushed by a Flush message. docs/chain.md, "Segments"."""

from __future__ import annotations

import json
from bisect import bisect_left

import numpy as np

from millrace.message.bodies import import_partitions, parse_body
from millrace.message.types import MessageType
from millrace.wal.message_run import (
    ACCEPTED,
    CARRIES_ROWS_MASK,
    DELETES_KEYS_MASK,
    DecidedBatch,
    DecidedMessage,
    Emission,
    MessageRun,
    group_indices,
)
from millrace.wal.segments import DELETES_POLICY, MESSAGE_POLICIES, Segment, size_policy
from millrace.wal.state import ChannelState, VChannelState


def create_emission(channel: VChannelState, partition_id: int) -> Emission:
    """Return the CreateSegment message for `partition_id`. Its tick becomes the segment's id."""
    return Emission(
        type=MessageType.CREATE_SEGMENT,
        vchannel=channel.name,
        collection_id=channel.collection_id,
        partition_id=partition_id,
    )


def flush_emission(channel: VChannelState, segment: Segment, policy: str) -> Emission:
    """Return the Flush message that ends `segment`, with its rows and the policy that sealed it."""
    return Emission(
        type=MessageType.FLUSH,
        vchannel=channel.name,
        collection_id=channel.collection_id,
        partition_id=segment.partition_id,
        segment_id=segment.id,
        rows=segment.rows,
        payload=json.dumps({"policy": policy}, separators=(",", ":")).encode(),
    )


def ready_flush(state: ChannelState) -> Emission | None:
    """Return the next Flush that can be emitted: of the sealed segment with the smallest id that no open transaction
    touches.
    """
    ready = [
        (segment.id, channel, segment)
        for channel in state.vchannels.values()
        for segment in channel.sealed.values()
        if not segment.txns
    ]
    if not ready:
        return None
    # The smallest id first: the order of Flush messages is a function of the state alone.
    _, channel, segment = min(ready, key=lambda item: item[0])
    return flush_emission(channel, segment, segment.seal_policy)


def cut_after_seal(state: ChannelState, run: MessageRun) -> None:
    """Cut the run right after the first message that fills a segment or blocks a VChannel by deletes."""
    if run.count == 1:
        return
    columns = run.columns
    pending = run.pending()
    inserts = pending[CARRIES_ROWS_MASK[run.type[pending]]]
    if len(inserts):
        partition = run.view(columns.partition_id)[inserts]
        for places in group_indices(run.view(columns.vchannel)[inserts], partition):
            rows = inserts[places]
            channel = state.vchannels[columns.vchannel_name(run.start + int(rows[0]))]
            segment = channel.growing.get(int(columns.partition_id[run.start + rows[0]]))
            if segment is not None:
                _cut_when_full(state, run, segment, rows)
    deletes = pending[pending < run.count]
    deletes = deletes[DELETES_KEYS_MASK[run.type[deletes]]]
    if len(deletes):
        for places in group_indices(run.view(columns.vchannel)[deletes]):
            rows = deletes[places]
            rows = rows[rows < run.count]  # an earlier VChannel may have cut the run
            channel = state.vchannels[columns.vchannel_name(run.start + int(deletes[places[0]]))]
            if len(rows) and channel.growing:
                # The message that crosses the limit still belongs to the run; what follows is judged with sealed
                # segments.
                room = DELETES_POLICY.remaining_rows(channel.growing.values(), channel.delete_rows, state.config)
                crossed = np.flatnonzero(np.cumsum(run.columns.rows[run.start + rows]) >= room)
                if len(crossed):
                    run.cut(int(rows[crossed[0]]) + 1)


def _cut_when_full(
    state: ChannelState, run: MessageRun, segment: Segment, rows: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> None:
    config = state.config
    rows = rows[rows < run.count]
    if not len(rows):
        return
    size = segment.bytes + np.cumsum(run.view(run.columns.size)[rows])
    count = segment.rows + np.cumsum(run.view(run.columns.rows)[rows])

    def full_with(place: int) -> bool:
        return bool(size_policy(segment._replace(bytes=int(size[place]), rows=int(count[place])), config))

    if full_with(len(rows) - 1):  # a full segment stays full with more content
        run.cut(int(rows[bisect_left(range(len(rows)), True, key=full_with)]) + 1)


def evolve_rows(state: ChannelState, rows: DecidedBatch) -> None:
    """Count accepted inserts, deletes and upserts (which are both), and seal full segments."""
    accepted = np.flatnonzero(rows.reason == ACCEPTED)
    inserts = accepted[CARRIES_ROWS_MASK[rows.type[accepted]]]
    if len(inserts):
        for places in group_indices(rows.vchannel[inserts], rows.segment_id[inserts]):
            _evolve_segment(state, rows, inserts[places])
    deletes = accepted[DELETES_KEYS_MASK[rows.type[accepted]]]
    if len(deletes):
        for places in group_indices(rows.vchannel[deletes]):
            each = deletes[places]
            channel = state.vchannels[rows.names[rows.vchannel[each[0]]]]
            count_deletes(state, channel, int(rows.rows[each].sum()))


def count_deletes(state: ChannelState, channel: VChannelState, rows: int) -> None:
    """Count deleted rows. Too many of them seal the growing segments."""
    channel.delete_rows += rows
    growing = list(channel.growing.values())
    if growing and DELETES_POLICY.remaining_rows(growing, channel.delete_rows, state.config) <= 0:
        for segment in growing:
            seal(channel, segment, DELETES_POLICY.name)


def _evolve_segment(state: ChannelState, rows: DecidedBatch, each: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
    channel = state.vchannels[rows.names[rows.vchannel[each[0]]]]
    # Rows are grouped by segment, and none follows the message that seals it: so the segment still grows here.
    segment = channel.growing[int(rows.partition_id[each[0]])]
    txns = {int(txn_id) for txn_id in np.unique(rows.txn_id[each]) if txn_id}
    _grown(
        state,
        channel,
        segment._replace(
            rows=segment.rows + int(rows.rows[each].sum()),
            bytes=segment.bytes + int(rows.size[each].sum()),
            last_insert_tick=int(rows.tick[each[-1]]),
            txns=segment.txns | txns if txns else segment.txns,
        ),
    )


def count_insert(state: ChannelState, channel: VChannelState, row: DecidedMessage) -> None:
    """Count one accepted insert, and seal its segment if it is full."""
    segment = channel.growing[row.partition_id]
    _grown(
        state,
        channel,
        segment._replace(
            rows=segment.rows + row.rows,
            bytes=segment.bytes + row.size,
            last_insert_tick=row.tick,
            txns=segment.txns | {row.txn_id} if row.txn_id else segment.txns,
        ),
    )


def _grown(state: ChannelState, channel: VChannelState, segment: Segment) -> None:
    channel.growing[segment.partition_id] = segment
    policy = size_policy(segment, state.config)
    if policy:
        seal(channel, segment, policy)


def seal(channel: VChannelState, segment: Segment, policy: str) -> None:
    """Accept no more inserts into `segment`. Its Flush follows once no open transaction touches it."""
    del channel.growing[segment.partition_id]
    channel.sealed[segment.id] = segment._replace(seal_policy=policy)


def count_import(channel: VChannelState, row: DecidedMessage) -> None:
    """Count an Import's rows into the segments that were created for it, and seal them."""
    for each in parse_body(MessageType.IMPORT, row.payload)["files"]:
        segment = channel.growing[each["partition_id"]]
        channel.growing[segment.partition_id] = segment._replace(
            rows=segment.rows + each["rows"], bytes=segment.bytes + each["bytes"], last_insert_tick=row.tick
        )
    # A copy: `seal` moves segments out of the dict.
    for segment in list(channel.growing.values()):
        seal(channel, segment, MESSAGE_POLICIES[MessageType.IMPORT])


def release_txn(channel: VChannelState, txn_id: int) -> None:
    """Remove an ended transaction from its segments."""
    for held in (channel.growing, channel.sealed):
        for key, segment in held.items():
            if txn_id in segment.txns:
                held[key] = segment._replace(txns=segment.txns - {txn_id})


def assign_segments(state: ChannelState, run: MessageRun) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return segment ids of the run's messages: the growing segment of an accepted insert; an Import's first one; else
    0.
    """
    columns = run.columns
    result = np.zeros(run.count, dtype=np.int64)
    if columns.type[run.start] == MessageType.IMPORT and run.first_accepted:
        partitions = import_partitions(parse_body(MessageType.IMPORT, columns.payload(run.start)))
        if partitions:
            result[0] = state.vchannels[columns.vchannel_name(run.start)].growing[partitions[0]].id
        return result
    pending = run.pending()
    inserts = pending[CARRIES_ROWS_MASK[run.type[pending]]]
    if len(inserts):
        for places in group_indices(run.view(columns.vchannel)[inserts], run.view(columns.partition_id)[inserts]):
            rows = inserts[places]
            row = run.start + int(rows[0])
            channel = state.vchannels[columns.vchannel_name(row)]
            result[rows] = channel.growing[int(columns.partition_id[row])].id
    return result
