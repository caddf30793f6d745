"""The key index of a collection's rows: which rows of which files have a key. Derived from the files.

`hashes` has the hash of a key, `run_file` the format of a run, `index` the runs of one table and their upkeep, `lookup`
what is found by them: rows that deletes hit, and rows of keys. `shared_index` copies an index between machines by the
tables' store.
"""
