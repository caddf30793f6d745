"""What a client and a server agree on: the wire, an append's outcome, the tail, how a server is found, connections. Knows no server.

A client of the log (`remote_log.py`) is here too: it speaks to a server of any version that keeps this contract.
"""
