"""The declaration of a table of MariaDB as a source."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from millrace.flows.declare.part import Secret, words
from millrace.flows.kinds import SourceKind
from millrace.flows.sources.capture.model import TablesOfDatabase

TableName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[^.`]+$")]


class MariaDbSource(TablesOfDatabase):
    """The rows of tables, and then each change of them, from the server's binary log. One task a table."""

    kind: Literal["mariadb"] = "mariadb"
    host: str = words("name or address of the server", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9_.:-]+$")
    port: int = words("", default=3306, ge=1, le=65535)
    user: str = words(
        "with the rights SELECT, RELOAD, REPLICATION SLAVE and BINLOG MONITOR", min_length=1, max_length=128
    )
    password: Secret = words("the user's password", default=Secret(""))
    tls: Literal["disable", "trust", "verify-ca", "verify-full"] = words("TLS of the connection", default="disable")
    database: str = words("", min_length=1, max_length=64, pattern=r"^[^.`]+$")
    table: TableName | None = words("the captured table, with a primary key", default=None)
    tables: Annotated[tuple[TableName, ...], Field(max_length=1000)] = words(
        "several tables, captured by one engine", default=()
    )
    start: Literal["earliest", "latest"] = words(
        "a snapshot of the table first, or only changes from now on", default="earliest"
    )
    on_loss: Literal["stop", "snapshot"] = words(
        "if the server has removed the binary log after the position: stop, or read the table again",
        default="stop",
    )
    foreign_keys: Literal["refuse", "ignore"] = words(
        "whether to capture a table although a foreign key changes its rows (ON DELETE CASCADE, SET NULL), which the"
        " binary log does not record",
        default="refuse",
    )
    spool_mib: int = words(
        "size of changes that wait for the flow; when it is reached, the capture pauses", default=1024, ge=1, le=1 << 20
    )

    @property
    def place(self) -> str:
        return self.database


KIND: Final = SourceKind(
    "mariadb",
    MariaDbSource,
    "millrace.flows.sources.mariadb.table:source_of",
    "millrace.flows.sources.mariadb.table:reader_of",
    tables=True,
    transactional=True,
    feeder="millrace.flows.sources.mariadb.table:feeder_of",
    release="millrace.flows.sources.mariadb.table:release",
)
