"""The declaration of a table of MariaDB as a source."""

from __future__ import annotations

from typing import Final, Literal

from millrace.flows.declare.part import Part, Secret, words
from millrace.flows.kinds import SourceKind


class MariaDbSource(Part):
    """The rows of a table, and then each change of it, from the server's binary log. One task."""

    kind: Literal["mariadb"] = "mariadb"
    host: str = words("name or address of the server", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9_.:-]+$")
    port: int = words("", default=3306, ge=1, le=65535)
    user: str = words(
        "with the rights SELECT, RELOAD, REPLICATION SLAVE and BINLOG MONITOR", min_length=1, max_length=128
    )
    password: Secret = words("of the user", default=Secret(""))
    tls: Literal["disable", "trust", "verify-ca", "verify-full"] = words("of the connection", default="disable")
    database: str = words("", min_length=1, max_length=64, pattern=r"^[^.`]+$")
    table: str = words("with a primary key", min_length=1, max_length=64, pattern=r"^[^.`]+$")
    start: Literal["earliest", "latest"] = words(
        "a snapshot of the table first, or only changes from now on", default="earliest"
    )
    on_loss: Literal["stop", "snapshot"] = words(
        "what happens if the server has removed the binary log after the position: stop, or read the table anew",
        default="stop",
    )
    spool_mib: int = words(
        "changes that wait for the flow; beyond it the capture waits", default=1024, ge=1, le=1 << 20
    )

    @property
    def name(self) -> str:
        """The table with its database."""
        return f"{self.database}.{self.table}"


KIND: Final = SourceKind(
    "mariadb",
    MariaDbSource,
    "millrace.flows.sources.mariadb.table:source_of",
    "millrace.flows.sources.mariadb.table:reader_of",
    feeder="millrace.flows.sources.mariadb.table:feeder_of",
)
