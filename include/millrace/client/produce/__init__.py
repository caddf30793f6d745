"""Producers: rows in, durable and decided messages out.

Single appends, batches, transactions, upserts, and rows from files.
"""
