"""The client library behind the public API: `produce/`, `consume/` and `spool/`.

It imports no host and no coordinator, and reaches a server only through `rpc`.
"""
