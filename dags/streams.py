"""Streams: one DAG for each declared stream or group of streams, keeping its job running (docs/declared-streams.md).

The modules and YAML files of the setting `flow_declarations` declare the streams.
"""

from __future__ import annotations

from millrace_airflow.streams import stream_dags

globals().update(stream_dags())
