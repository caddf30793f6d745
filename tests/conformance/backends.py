"""The backends that the conformance suite runs on: one line each.

A factory opens (or makes) the deployment that lives in a directory, with MAX_ENTRY_BYTES as the limit of an entry and files
as small as the backend allows. Closing the service and calling the factory again with the same directory is a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from millrace.log.discovery import ServerRecord, remove_record, write_record
from millrace.log.protocol import LogService
from millrace.log.remote import RemoteLogService
from millrace.log.rocksmq import RocksMQ
from millrace.log.rocksmq_settings import RocksMQSettings
from millrace.log.server_flight import LogServer

MAX_ENTRY_BYTES = 1 << 20

SETTINGS = RocksMQSettings(segment_bytes=128 << 10, spare_files=2, max_entry_bytes=MAX_ENTRY_BYTES)


class Served(RemoteLogService):
    """The embedded log over the wire: a server in this process and its client, closed together."""

    server: LogServer
    record: ServerRecord

    @classmethod
    def over(cls, directory: Path) -> Served:
        draft = ServerRecord.of_this_process("")
        server = LogServer(RocksMQ(directory, settings=SETTINGS), token=draft.token)
        record = replace(draft, address=server.address)
        write_record(directory, record)
        served = cls.connect(directory, start=False)
        served.server, served.record = server, record
        return served

    def close(self) -> None:
        super().close()
        if not self.server.gate.closed:
            self.server.close()
            remove_record(Path(self._folder), self.record)


BACKENDS: dict[str, Callable[[Path], LogService]] = {
    "rocksmq": lambda directory: RocksMQ(directory, settings=SETTINGS),
    "rocksmq behind its server": Served.over,
}
