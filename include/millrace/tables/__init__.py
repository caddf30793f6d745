"""The Delta tables: `wal/` (messages, rejections, states), `collections/` (rows, deletes, segments, checkpoints),
`read/`.
"""
