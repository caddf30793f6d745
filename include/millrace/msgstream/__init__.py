"""The message-stream API of chapter 4 (produce, consume, seek, dispatchers) on any log (docs/msgstream.md)."""
