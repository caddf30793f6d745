"""Groups of files spread over Spark tasks: each task rewrites its share in one Python worker; no row passes the JVM."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession

from millrace.operations.compaction.files import FileGroup
from millrace.operations.compaction.rewrite import RewriteJob, RewriteMapper, RewriteResult, load_deletes, rewrite_group

TASKS_PER_CORE: Final = 4
"""More tasks than cores, so that a long one does not leave the others idle; each reads the deletes it folds in once."""


def spark_mapper(spark: SparkSession, *, cores: int) -> RewriteMapper:
    """Rewrites groups in tasks of `spark`."""

    def run(job: RewriteJob, groups: Sequence[FileGroup]) -> list[RewriteResult]:
        if not groups:
            return []
        tasks = min(len(groups), cores * TASKS_PER_CORE)
        ordered = sorted(groups, key=lambda group: group.size, reverse=True)
        shares = [ordered[number::tasks] for number in range(tasks)]

        def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    deletes = load_deletes(job.fold)
                    done = [pickle.dumps(rewrite_group(job, group, deletes)) for group in shares[number]]
                    yield pa.RecordBatch.from_pydict({"done": pa.array(done, pa.binary())})

        rows = spark.range(0, tasks, 1, tasks).mapInArrow(work, "done binary").collect()
        return [pickle.loads(bytes(row["done"])) for row in rows]

    return run
