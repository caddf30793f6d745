"""The one loop that keeps a table up with what lies before it: plan, run ranges, commit, again.

`definition` says what a user of it brings (ingest and flush are two; a stream over the WAL has its place), `schedule` what the next
micro-batch is, `batches` what becomes of its ranges behind the commit. Two hosts run it: Spark (`query`, `source`) and the calling
process (`in_process`).
"""
