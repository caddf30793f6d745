"""The commands of ``millrace``, one module a group or command; each registers itself (millrace.commands.main imports what there is).

They read arguments, call the package and print. Whatever takes long to import (pyarrow, deltalake, duckdb, Flight, Spark, pydantic) is
imported inside a command, so that ``millrace --help`` answers at once. What they share is in `parts/`.
"""
