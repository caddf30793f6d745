"""The hosts of the chain: `append/` judges and answers, `ingest/` brings the log into `wal`, `flush/` the WAL into collections.

`range/` is what ingest and flush share, `retention/` gives up what the tables hold durably.
"""
