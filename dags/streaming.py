"""Streaming: keeps the streaming node and the flusher alive.

One job (`jobs/streaming_node.py --with-flusher`) runs detached from Airflow. A run of this DAG starts it, or adopts the one
that runs, and watches it: progress goes to the task's log (rows, rows per second, lag, last commit), a job that failed, was
killed or hangs is started again after a pause that doubles up to five minutes. After an hour the run ends with the job still
running, and the next run goes on watching.

- **Pausing this DAG stops the job** between two micro-batches; unpausing starts it again.
- Marking the task failed stops it too. A worker, scheduler or triggerer that is killed does not: the next try finds the job.
- The setting `spark_master` runs its tasks on a Spark cluster.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import Param

from millrace_airflow.defaults import millrace_dag
from millrace_airflow.streaming import StreamingJobOperator

with millrace_dag(
    "streaming",
    doc=__doc__,
    paused=True,  # `make up` unpauses it once Airflow answers
    schedule="@continuous",
    tags=["streaming"],
    deadline=timedelta(hours=2),
    params={
        "watch_seconds": Param(
            3600,
            type="integer",
            minimum=5,
            maximum=86400,
            title="Watch for (seconds)",
            description="How long this run watches the job before the next run takes over; the job goes on meanwhile.",
        )
    },
    task_defaults={"retries": 20, "retry_delay": timedelta(seconds=5), "max_retry_delay": timedelta(minutes=1)},
) as dag:
    StreamingJobOperator(task_id="supervise", watch_for="{{ params.watch_seconds }}", priority_weight=100)
