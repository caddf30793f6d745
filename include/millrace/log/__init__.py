"""The log that producers append to: `protocol.py` says what a backend promises, `registry.py` opens one by its URL.

A folder a backend (`rocksmq/`, `kafka/`, `pulsar/`); `generations/` is a log that moves between backends; `server/` is the process that owns
a data folder's log, or stands before a broker's. One conformance suite runs against all of them (tests/conformance).
"""
