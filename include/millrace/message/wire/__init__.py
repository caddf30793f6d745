"""The wire form of log entries (docs/wire-form.md): messages to bytes, bytes to the Arrow batch form.

One entry frames 1 to 65,536 messages with columnar headers and carries a checksum; it is one value for any backend.
`encode` writes, `decode` reads, `framing` looks at a header alone before an append; `layout` holds the numbers.
"""
