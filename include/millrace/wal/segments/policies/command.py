"""By command: people, or a host that decides by what the log cannot know (memory, disk), ask for the flush by a message."""

from __future__ import annotations

from typing import Final

from millrace.message.types import MessageType

COMMAND_POLICIES: Final = {
    MessageType.MANUAL_FLUSH: "manual",
    MessageType.FLUSH_ALL: "flush_all",
}
