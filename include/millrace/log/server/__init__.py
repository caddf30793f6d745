"""The process that owns a data folder's log, or stands before a broker's, and serves it over Arrow Flight. `main.py` is its program."""
