"""The message model: ids and time ticks, types and their numbers, schemas, mutable and immutable messages, the wire
form.

Messages travel as Arrow columns (`columns.py`); a log entry may frame many of them (docs/wire-form.md). This room is
pure: no log, no table, no clock.
"""
