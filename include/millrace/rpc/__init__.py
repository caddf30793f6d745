"""The contract between clients and servers: wire form, append outcomes, the tail, discovery, connections.

Knows no server.

A client of the log (`remote_log.py`) is here too: it works with a server of any version that keeps this contract.
"""
