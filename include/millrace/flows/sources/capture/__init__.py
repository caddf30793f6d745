"""Changes of databases as a source: Debezium's engine in its own JVM, and a spool of what it read (docs/capture.md).

The engine reads on by itself and cannot read a range again. So its batches go into a spool on the local disk, together
with the position that they end at, before the engine gets its acknowledgement. Lanes are read from the spool.
"""
