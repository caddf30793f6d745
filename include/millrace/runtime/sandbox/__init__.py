"""Work that strangers made, done in a process apart: it ends in time, within its memory, or its process is killed.

`asking.py` is the side that asks; `answering.py` what the process apart runs; `frames.py` what they say to each other.
"""
