"""The process that owns a data folder's log, or fronts a broker's, and serves it over Arrow Flight. `main.py` is its
program.
"""
