"""Pipelines: topics in, transformed documents out, declared once and supervised (docs/pipelines.md).

``model/`` is the declaration, which API, store and worker share; ``transform/`` its steps, compiled; ``sinks/`` where documents go, a
folder a sink; ``worker/`` the process that runs one pipeline by the range loop.
"""
