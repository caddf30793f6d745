"""What every room may use: the error family, settings, metrics, failpoints, small files replaced whole, pauses, scratch folders.

Nothing here knows what Millrace is for. Who needs a helper looks here first; what only one room needs stays in that room.
"""
