"""The hosts of the chain.

- `append/` judges appends and answers producers.
- `ingest/` brings the log into the ``wal`` table, `flush/` brings the WAL into the collections' tables.
- `range_loop/` is the loop that ingest and flush share.
- `retention/` removes what the tables hold durably.
"""
