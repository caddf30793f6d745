"""Rows and keys in: messages cut by VChannel, stamped, sent in order by one lane a PChannel (`lane.py`), each with one effect (law 8)."""
