"""The log that producers append to. `protocol.py` defines what a backend promises; `registry.py` opens one by URL.

Each backend has a folder (`rocksmq/`, `kafka/`, `pulsar/`). `generations/` is a log that moves between backends.
`server/` is the process that owns a data folder's log, or fronts a broker's. One conformance suite runs against all
of them (tests/conformance).
"""
