"""The chain: a pure function of (channel state, log range), of which every host and every recovery is a caller. Begin with `chain.py`.

`interceptors/` holds its links, one folder each. Nothing here reads a clock, a random number or a setting of a host (law 1).
"""
