"""Pipelines: topics in, transformed documents out, declared once and supervised (docs/pipelines.md).

``model/`` is the declaration, which API, store and worker share. ``transform/`` compiles its steps. ``sinks/`` writes
documents, one folder for each sink. ``worker/`` is the process that runs one pipeline by the range loop.
"""
