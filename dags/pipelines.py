"""Pipelines: a DAG for each that is declared with `deployment: airflow`, which keeps its worker alive (docs/pipelines-api.md).

Which there are stands in the store of the pipeline service.
"""

from __future__ import annotations

from millrace_airflow.pipelines import pipeline_dags

globals().update(pipeline_dags())
