"""The wire form of log entries (docs/wire-form.md): messages to bytes, bytes to the Arrow batch form.

An entry frames 1 to 65,536 messages with columnar headers and has a checksum; it is one value for any backend. `encode`
writes, `decode` reads, `framing` checks only the fixed part before an append, `layout` has the constants.
"""
