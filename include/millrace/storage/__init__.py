"""Where tables lie, and the one fenced commit into them.

- :mod:`~millrace.storage.store`: :class:`TableStore`, the place of one table by its URI: put a file, list, delete, lease, sync,
  open. :mod:`~millrace.storage.local` is a folder of a file system; an object store is a second class of the same shape.
- :mod:`~millrace.storage.table`: :class:`Table`, a handle on one table at one version.
- :mod:`~millrace.storage.commit`: :func:`commit_fenced`, the one way in which files come into a table or leave it, and
  :func:`alter_fenced` for its columns and properties.
- :mod:`~millrace.storage.file_sink`: Parquet files that are durable before a commit names them; the one type of file action.

Nobody else opens a Delta table, reads or writes its log, or makes its files durable.
"""
