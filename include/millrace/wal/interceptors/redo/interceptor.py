"""Redo: if the shard has no growing segment for an insert, have one created first and run the rest again.

Milvus' redo interceptor waits until a segment is allocated. Here nothing waits: the run ends before the first insert
without a segment, or is that insert alone; the shard then emits the CreateSegment message before it, with a time tick
of its own.
"""

from __future__ import annotations

import numpy as np

from millrace.wal.interceptors.interceptor import Proceed
from millrace.wal.message_run import CARRIES_ROWS_MASK, DecidedBatch, DecidedMessage, MessageRun, group_indices
from millrace.wal.state import ChannelState


class RedoInterceptor:
    """The outermost interceptor."""

    name = "redo"

    def decide(self, state: ChannelState, run: MessageRun, proceed: Proceed) -> None:
        # The inner interceptors judge first: a message that they reject needs no segment.
        proceed(run)
        columns = run.columns
        inserts = run.pending()
        inserts = inserts[CARRIES_ROWS_MASK[run.type[inserts]]]
        if not len(inserts):
            return
        vchannel, partition = run.view(columns.vchannel)[inserts], run.view(columns.partition_id)[inserts]
        lacking = np.zeros(len(inserts), dtype=bool)
        for rows in group_indices(vchannel, partition):
            name = columns.names[vchannel[rows[0]]]
            if int(partition[rows[0]]) not in state.vchannels[name].growing:
                lacking[rows] = True
        places = inserts[lacking]
        if len(places):
            # The shard emits CreateSegment before the first message of a run only. What is cut off is judged again.
            run.cut(int(places[0]))

    def evolve(self, state: ChannelState, rows: DecidedBatch) -> None:
        """Do nothing: redo has no state."""

    def evolve_one(self, state: ChannelState, row: DecidedMessage) -> None:
        """Do nothing: redo has no state."""
