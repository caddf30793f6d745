"""Foundations for every room: errors, settings, metrics, failpoints, durable files, locks, back-off, scratch folders.

Nothing here knows what Millrace is for. Look here before you write a helper; keep code that only one room needs in that
room.
"""
