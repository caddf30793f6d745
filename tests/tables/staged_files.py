"""Files staged as a loader stages them.

Parquet below the staged folder, digested by code that shares nothing with what reads them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.message.bodies import ImportFile
from millrace.storage.store import store_at


def stage(
    staged: object, path: str, rows: pa.RecordBatch | pa.Table, *, partition: int = 1, group: int = 2
) -> ImportFile:
    """Write `rows` to ``staged/path`` in row groups of `group` rows; what an Import says of the file."""
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    written = pa.BufferOutputStream()
    pq.write_table(table, written, row_group_size=group)
    data = written.getvalue().to_pybytes()
    if "://" in str(staged):
        store_at(staged).replace(path, data)
    else:
        target = Path(str(staged)) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return {"path": path, "partition_id": partition, "rows": table.num_rows, "bytes": len(data), "digest": digest}
