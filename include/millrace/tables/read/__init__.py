"""Reads of a collection at a time tick: planned by `plan.py`, then read as Arrow (`arrow.py`) or as a DataFrame
(`spark.py`).
"""
