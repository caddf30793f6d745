"""Record batches as a hostile client sends them: what their offsets say is not what they hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def tampered(values: Sequence[bytes], offsets: Sequence[int]) -> pa.RecordBatch:
    """A batch with the one column `value`, read off the wire with these offsets in place of its own.

    Arrow takes it as it comes.
    """
    schema = pa.schema([pa.field("value", pa.large_binary(), nullable=False)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays([pa.array(values, pa.large_binary())], schema=schema))
    raw = sink.getvalue().to_pybytes()
    own = np.concatenate([[0], np.cumsum([len(value) for value in values])]).astype("<i8").tobytes()
    place = raw.rindex(own)
    raw = raw[:place] + np.array(offsets, "<i8").tobytes() + raw[place + len(own) :]
    return pa.ipc.open_stream(raw).read_next_batch()


HOSTILE = {
    "beyond its bytes": [0, 5, 1 << 22],
    "far away": [1 << 40, (1 << 40) + 8, (1 << 40) + 16],
    "before its bytes": [-64, 0, 5],
    "backwards": [0, 10, 5],
}
"""Offsets of two values of 5 bytes."""
