"""What is given up once the tables hold it durably: the log's head, small files of `wal`; never while a backup looks."""
