"""A sandbox for untrusted work: worker processes with limits of time and memory, killed when they exceed them.

`pool.py` is the caller's side, `worker.py` the worker's, `protocol.py` the frames between them.
"""
