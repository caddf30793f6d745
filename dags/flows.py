"""Flows with a schedule: one DAG each, whose run moves what the source has, and ends (docs/flows.md).

The modules and YAML files of the setting `flow_declarations` declare the flows. Those without a schedule run always:
dags/streams.py has the DAGs of those on Spark.
"""

from __future__ import annotations

from millrace_airflow.flows import scheduled_dags

globals().update(scheduled_dags())
