"""Distribution of messages to channels by hash key, and of inserts and deletes row by row, as in Milvus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from millrace.base.errors import InvalidArgument
from millrace.msgstream.messages import DeleteMsg, InsertMsg
from millrace.msgstream.pack import MsgPack
from millrace.msgstream.protocol import TsMsg


def channel_numbers(msgs: Sequence[TsMsg], channels: int) -> list[list[int]]:
    """Return each message's hash keys modulo the number of channels: the input of a RepackFunc."""
    return [[key % channels for key in msg.hash_keys] for msg in msgs]


def default_repack(msgs: Sequence[TsMsg], hash_keys: Sequence[Sequence[int]]) -> Mapping[int, MsgPack]:
    """Send every message to the channel of its hash key; split an insert or a delete with several keys by rows.

    The order of messages is kept per channel.
    Raises InvalidArgument for a message without a hash key (broadcast it, or give it one), and if the number of hash
    keys is not the number of rows.
    """
    packs: dict[int, MsgPack] = {}
    for msg, keys in zip(msgs, hash_keys, strict=True):
        for channel, part in _parts(msg, keys):
            packs.setdefault(channel, MsgPack()).msgs.append(part)
    return packs


def _parts(msg: TsMsg, keys: Sequence[int]) -> list[tuple[int, TsMsg]]:
    wanted = set(keys)
    if len(wanted) == 1:
        return [(keys[0], msg)]
    if not wanted:
        raise InvalidArgument(
            f"message {msg.id} ({msg.type.name}) has no hash key, but there are several channels: add one, or"
            " broadcast it"
        )
    if not isinstance(msg, InsertMsg | DeleteMsg):
        raise InvalidArgument(
            f"message {msg.id} ({msg.type.name}) has hash keys of several channels, but no rows to split"
        )
    rows = msg.rows.num_rows if isinstance(msg, InsertMsg) else len(msg.primary_keys)
    if rows != len(keys):
        raise InvalidArgument(f"message {msg.id} has {len(keys)} hash keys for {rows} rows: give one per row")
    numbers = np.asarray(keys)
    return [(channel, _select(msg, np.flatnonzero(numbers == channel))) for channel in sorted(wanted)]


def _select(msg: InsertMsg | DeleteMsg, places: np.ndarray[tuple[int], np.dtype[np.intp]]) -> TsMsg:
    indices = pa.array(places, pa.int64())
    hash_keys = tuple(msg.hash_keys[place] for place in places.tolist())
    timestamps = None if msg.timestamps is None else msg.timestamps.take(indices)
    # Parts with row timestamps compute their own range; others keep the range of the message.
    stamps = (0, 0) if timestamps is not None else (msg.begin_ts, msg.end_ts)
    if isinstance(msg, InsertMsg):
        return replace(
            msg,
            rows=msg.rows.take(indices),
            timestamps=timestamps,
            row_ids=None if msg.row_ids is None else msg.row_ids.take(indices),
            hash_keys=hash_keys,
            begin_ts=stamps[0],
            end_ts=stamps[1],
        )
    return replace(
        msg,
        primary_keys=msg.primary_keys.take(indices),
        timestamps=timestamps,
        hash_keys=hash_keys,
        begin_ts=stamps[0],
        end_ts=stamps[1],
    )
