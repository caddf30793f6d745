"""The chain: a pure function of (channel state, log range), which every host and every recovery calls. Start with
`chain.py`.

`interceptors/` holds its interceptors, one folder each. Nothing here reads a clock, a random number or a setting of a
host (law 1).
"""
