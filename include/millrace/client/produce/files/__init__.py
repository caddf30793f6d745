"""Rows from files, in batches.

A row that does not fit is reported with its line, the column, the value and the reason.
"""
