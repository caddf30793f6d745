"""Flows: any source, any transform, any sink (docs/flows.md).

``declare/`` is what a user writes. ``sources/`` and ``sinks/`` have one folder a kind, and one contract a side.
``transform/`` runs document steps. Two hosts run a flow: ``range_host/`` by the range loop, and ``spark_host/`` as a
Spark query. ``errors/`` stores failed records and redrives them.
"""
