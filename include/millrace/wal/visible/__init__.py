"""Visible rows and changes of collections from WAL messages, without a table.

`catalog.py` evolves by DDL, `columns.py` has the columns beside a collection's fields, `collection_rows.py` makes rows
and deletes, `changes.py` makes a stream of changes. The ``wal`` table and a server's tail give the same results.
"""
