"""The commands of ``millrace``, one module a group or command; each registers itself (millrace.commands.main imports
what there is).

Commands read arguments, call the package and print. Heavy imports (pyarrow, deltalake, duckdb, Flight, Spark, pydantic)
belong inside a command, so that ``millrace --help`` answers at once. `parts/` holds what commands share.
"""
