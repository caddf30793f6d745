"""The backends that the conformance suite runs on: one line each.

A factory opens (or makes) the deployment that lives in a directory, with MAX_ENTRY_BYTES as the limit of an entry and files
as small as the backend allows. Closing the service and calling the factory again with the same directory is a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from millrace.log.protocol import LogService
from millrace.log.rocksmq import RocksMQ
from millrace.log.rocksmq_settings import RocksMQSettings

MAX_ENTRY_BYTES = 1 << 20

SETTINGS = RocksMQSettings(segment_bytes=128 << 10, spare_files=2, max_entry_bytes=MAX_ENTRY_BYTES)

BACKENDS: dict[str, Callable[[Path], LogService]] = {
    "rocksmq": lambda directory: RocksMQ(directory, settings=SETTINGS),
}
