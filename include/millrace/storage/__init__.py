"""Storage of tables, and the one fenced commit.

- :mod:`~millrace.storage.store`: :class:`TableStore`, the storage of one table by its URI: create a file, list, delete,
  lease, sync, open. :mod:`~millrace.storage.local` is a folder; an object store is another class of the same shape.
- :mod:`~millrace.storage.table`: :class:`TableHandle`, a handle on one table at one version.
- :mod:`~millrace.storage.commit`: :func:`commit_fenced`, the only way to add files to a table or remove them, and
  :func:`alter_fenced` for its columns and properties.
- :mod:`~millrace.storage.file_sink`: Parquet files that are durable before a commit names them.

No other room opens a Delta table, reads or writes its log, or makes its files durable.
"""
