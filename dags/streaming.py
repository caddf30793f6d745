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

from millrace_airflow.defaults import WATCH_FOR, supervising_dag
from millrace_airflow.streaming import StreamingJobOperator

with supervising_dag("streaming", doc=__doc__, tags=["streaming"]) as dag:  # `make up` unpauses it once Airflow answers
    StreamingJobOperator(task_id="supervise", watch_for=WATCH_FOR, priority_weight=100)
