"""The commands of ``millrace``, one module a group; millrace.cli puts them together.

They read arguments, call the package and print. Whatever takes long to import (pyarrow, deltalake, duckdb, Flight, Spark) is
imported inside a command, so that ``millrace --help`` answers at once.
"""
