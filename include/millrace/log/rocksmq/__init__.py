"""RocksMQ, the embedded log: segment files are the truth (checksummed, stamped records, one sync an acknowledgement), RocksDB an index.

Begin with `channel_log.py`; `service.py` is the API of chapter 4, `stamp_clock.py` gives entries their time.
"""
