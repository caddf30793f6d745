"""From messages to what readers of a collection are to see: what is visible of them, decoded, placed, in order; without a table.

`catalog.py` is what DDL adds up to, `columns.py` what stands beside a collection's fields, `rows.py` makes rows and deletes,
`changes.py` a stream of them. Whoever has the messages, from the ``wal`` table or a server's tail, gets the same from here.
"""
