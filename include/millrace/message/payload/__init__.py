"""Rows in a message: `rows` encodes and decodes payloads, `join` decodes many at once, `layout` checks their
structure.
"""
