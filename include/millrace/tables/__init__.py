"""The Delta tables: `wal/` (messages, rejections, states), `collections/` (their places, rows, deletes, segments,
checkpoints), `read/`.
"""
