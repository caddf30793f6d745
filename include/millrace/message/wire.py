"""The wire form of log entries (docs/wire-form.md): messages to bytes, bytes to the Arrow batch form.

One entry frames 1 to 65,536 messages with columnar headers and carries a checksum; it is one value for any backend.
Writing stands in wire_encode, reading in wire_decode, the layout's numbers in wire_layout.
"""

from millrace.message.model import ImmutableMessage, MutableMessage
from millrace.message.wire_decode import decode_columns, decode_entries, entry_crc
from millrace.message.wire_encode import encode_columns, encode_entry

__all__ = [
    "ImmutableMessage",
    "MutableMessage",
    "decode_columns",
    "decode_entries",
    "encode_columns",
    "encode_entry",
    "entry_crc",
]
