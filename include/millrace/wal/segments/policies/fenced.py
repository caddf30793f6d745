"""Fenced by DDL, or by an Import: what grows ends before the message that changes what would be in it."""

from __future__ import annotations

from typing import Final

from millrace.message.types import MessageType

FENCING_POLICIES: Final = {
    MessageType.SCHEMA_CHANGE: "schema_change",
    MessageType.DROP_PARTITION: "drop_partition",
    MessageType.DROP_COLLECTION: "drop_collection",
    MessageType.IMPORT: "import",
}
