"""Streaming: keep the streaming node and the flusher running.

One job (`jobs/streaming_node.py --with-flusher`) runs detached from Airflow. A run of this DAG starts the job, or
adopts one that runs, and watches it. Its progress goes to the task's log: rows, rows per second, lag, last commit. A
job that failed, was killed or hangs is restarted after a pause that doubles up to five minutes. After an hour the run
ends, the job keeps running, and the next run watches it.

- **Pausing this DAG stops the job** between two micro-batches; unpausing starts it again.
- Marking the task failed stops the job too. Killing a worker, scheduler or triggerer does not: the next try adopts the
  job.
- The setting `spark_master` runs the job's tasks on a Spark cluster.
"""

from __future__ import annotations

from millrace_airflow.defaults import WATCH_FOR, supervising_dag
from millrace_airflow.streaming import StreamingJobOperator

with supervising_dag("streaming", doc=__doc__, tags=["streaming"]) as dag:  # `make up` unpauses it when Airflow answers
    StreamingJobOperator(task_id="supervise", watch_for=WATCH_FOR, priority_weight=100)
