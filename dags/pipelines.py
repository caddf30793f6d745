"""Pipelines: one DAG for each pipeline with `deployment: airflow`, which keeps its worker running.

The store of the pipeline service holds the declarations (docs/pipelines-api.md).
"""

from __future__ import annotations

from millrace_airflow.pipelines import pipeline_dags

globals().update(pipeline_dags())
