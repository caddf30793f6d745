"""RocksMQ, the embedded log. Segment files are the truth (checksummed, stamped records, one sync per acknowledgement);
RocksDB is an index.

Start with `channel_log.py`. `service.py` has the API of reference document 002, chapter 4; `stamp_clock.py` stamps
entries.
"""
