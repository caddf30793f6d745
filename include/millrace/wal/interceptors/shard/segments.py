"""Segments of a VChannel: growing, sealed by a policy, flushed by a Flush message. docs/chain.md, "Segments"."""

from __future__ import annotations

import json
from bisect import bisect_left

import numpy as np

from millrace.message.bodies import import_partitions, parse_body
from millrace.message.types import MessageType
from millrace.wal.config import ChainConfig
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
from millrace.wal.open_work import SEGMENTS
from millrace.wal.segments import DELETES_POLICY, MESSAGE_POLICIES, NEVER, Segment, size_policy
from millrace.wal.shared_map import SharedMap
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
    # The smallest id first: the order of Flush messages is a function of the state alone.
    first = state.open_work.ready
    if first == NEVER:
        return None
    channel = next(state.channels_with(lambda work: work.ready == first))
    segment = channel.sealed[first]
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
                room = _remaining_rows(channel, state.config)
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
            state.put(count_deletes(channel, state.config, int(rows.rows[each].sum())))


def count_deletes(channel: VChannelState, config: ChainConfig, rows: int) -> VChannelState:
    """Count deleted rows. Too many of them seal the growing segments."""
    channel = channel._replace(delete_rows=channel.delete_rows + rows)
    if channel.growing and _remaining_rows(channel, config) <= 0:
        return seal_all(channel, DELETES_POLICY.name)
    return channel


def _remaining_rows(channel: VChannelState, config: ChainConfig) -> int:
    """Return how many more rows may be deleted before the VChannel's growing segments are sealed."""
    _, deletes_before = channel.open_work(config).oldest
    return DELETES_POLICY.remaining_rows(deletes_before, channel.delete_rows, config)


def _evolve_segment(state: ChannelState, rows: DecidedBatch, each: np.ndarray[tuple[int], np.dtype[np.intp]]) -> None:
    channel = state.vchannels[rows.names[rows.vchannel[each[0]]]]
    # Rows are grouped by segment, and none follows the message that seals it: so the segment still grows here.
    segment = channel.growing[int(rows.partition_id[each[0]])]
    txns = {int(txn_id) for txn_id in np.unique(rows.txn_id[each]) if txn_id}
    grown = segment._replace(
        rows=segment.rows + int(rows.rows[each].sum()),
        bytes=segment.bytes + int(rows.size[each].sum()),
        last_insert_tick=int(rows.tick[each[-1]]),
        txns=segment.txns | txns if txns else segment.txns,
    )
    state.put(_with_segment(channel, state.config, grown))


def count_insert(channel: VChannelState, config: ChainConfig, row: DecidedMessage) -> VChannelState:
    """Count one accepted insert, and seal its segment if it is full."""
    segment = channel.growing[row.partition_id]
    grown = segment._replace(
        rows=segment.rows + row.rows,
        bytes=segment.bytes + row.size,
        last_insert_tick=row.tick,
        txns=segment.txns | {row.txn_id} if row.txn_id else segment.txns,
    )
    return _with_segment(channel, config, grown)


def _with_segment(channel: VChannelState, config: ChainConfig, segment: Segment) -> VChannelState:
    """Take a growing segment in place of its earlier self, sealed if it is full."""
    policy = size_policy(segment, config)
    if policy:
        return seal(channel, segment, policy)
    return channel._replace(growing=channel.growing.set(segment.partition_id, segment))


def seal(channel: VChannelState, segment: Segment, policy: str) -> VChannelState:
    """Close `segment` to inserts. Its Flush follows once no open transaction touches it."""
    return channel._replace(
        growing=channel.growing.without(segment.partition_id),
        sealed=channel.sealed.set(segment.id, segment._replace(seal_policy=policy)),
    )


def seal_all(channel: VChannelState, policy: str) -> VChannelState:
    """Seal all growing segments of the VChannel."""
    for segment in channel.growing.values():
        channel = seal(channel, segment, policy)
    return channel


def count_import(channel: VChannelState, row: DecidedMessage) -> VChannelState:
    """Count an Import's rows into the segments that were created for it, and seal them."""
    growing = channel.growing
    for each in parse_body(MessageType.IMPORT, row.payload)["files"]:
        segment = growing[each["partition_id"]]
        grown = segment._replace(
            rows=segment.rows + each["rows"], bytes=segment.bytes + each["bytes"], last_insert_tick=row.tick
        )
        growing = growing.set(segment.partition_id, grown)
    return seal_all(channel._replace(growing=growing), MESSAGE_POLICIES[MessageType.IMPORT])


def release_txn(channel: VChannelState, txn_id: int, config: ChainConfig) -> VChannelState:
    """Remove an ended transaction from its segments."""

    def touched(held: SharedMap[int, Segment]) -> SharedMap[int, Segment]:
        for key, segment in list(held.where(SEGMENTS, config, lambda work: txn_id in work.txn_ids)):
            held = held.set(key, segment._replace(txns=segment.txns - {txn_id}))
        return held

    return channel._replace(growing=touched(channel.growing), sealed=touched(channel.sealed))


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
