"""The message model: ids and time ticks, types and their numbers, schemas, mutable and immutable messages, the wire form.

Messages travel as Arrow columns (`batch.py`); one log entry may frame many of them (docs/wire-form.md). Pure: no log, no table, no clock.
"""
