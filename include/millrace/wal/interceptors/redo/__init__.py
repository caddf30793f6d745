"""Redo: where the shard has no growing segment for an insert, have one made first and run the rest again.

Milvus' redo interceptor waits until a segment was allocated; here nothing waits: the CreateSegment message is emitted
before the insert, takes a time tick of its own, and the insert follows it. An Import has a segment of its own made for
each partition that it brings rows to.
"""

from __future__ import annotations

import numpy as np

from millrace.message.bodies import import_partitions, parse_body
from millrace.message.types import MessageType
from millrace.wal.interceptors import Proceed
from millrace.wal.run import Decided, Emission, Row, Run, groups
from millrace.wal.state import ChannelState, VChannelState


class Redo:
    """Outermost link."""

    name = "redo"

    def decide(self, state: ChannelState, run: Run, proceed: Proceed) -> None:
        proceed(run)
        columns = run.columns
        if columns.type[run.start] == MessageType.IMPORT:
            if run.accepted_one:
                self._make_for_import(state, run)
            return
        inserts = run.pending()
        inserts = inserts[run.view(columns.type)[inserts] == MessageType.INSERT]
        if not len(inserts):
            return
        vchannel, partition = run.view(columns.vchannel)[inserts], run.view(columns.partition_id)[inserts]
        lacking = np.zeros(len(inserts), dtype=bool)
        for rows in groups(vchannel, partition):
            name = columns.names[vchannel[rows[0]]]
            if int(partition[rows[0]]) not in state.vchannels[name].growing:
                lacking[rows] = True
        places = inserts[lacking]
        if not len(places):
            return
        if places[0] > 0:
            run.cut(int(places[0]))
            return
        run.cut(1)
        channel = state.vchannels[columns.vchannel_name(run.start)]
        run.before.append(_create(channel, int(columns.partition_id[run.start])))

    def _make_for_import(self, state: ChannelState, run: Run) -> None:
        """Behind the flushes of what grew: the segments' ids, which are ticks, follow one another without a gap."""
        channel = state.vchannels[run.columns.vchannel_name(run.start)]
        body = parse_body(MessageType.IMPORT, run.columns.payload(run.start))
        run.before += [_create(channel, number) for number in import_partitions(body)]

    def evolve(self, state: ChannelState, rows: Decided) -> None:
        """Redo has no state."""

    def evolve_one(self, state: ChannelState, row: Row) -> None:
        """Redo has no state."""


def _create(channel: VChannelState, partition_id: int) -> Emission:
    return Emission(
        type=MessageType.CREATE_SEGMENT,
        vchannel=channel.name,
        collection_id=channel.collection_id,
        partition_id=partition_id,
    )
