"""The message-stream API of reference document 002, chapter 4 (produce, consume, seek, dispatchers), on any log
(docs/msgstream.md).
"""
