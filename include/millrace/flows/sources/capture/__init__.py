"""Changes of databases as a source: Debezium's engine in its own JVM, and a spool of its output (docs/capture.md).

The engine reads continuously and cannot read a range again. So its batches go into a spool on the local disk, together
with the position after them, before the engine gets its acknowledgement. Lanes are read from the spool.
"""
