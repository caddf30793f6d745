"""The declaration of a table of PostgreSQL as a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, StringConstraints

from millrace.flows.declare.part import Secret, words
from millrace.flows.kinds import SourceKind
from millrace.flows.sources.capture.model import TablesOfDatabase

_NAME: Final = r'^[^.,"\x00]+$'
_SLOT: Final = r"^([a-z0-9_]{1,63})?$"
TableName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=_NAME)]


class PostgresSource(TablesOfDatabase):
    """The rows of tables, and then each change of them, by logical decoding. One task a table."""

    kind: Literal["postgres"] = "postgres"
    host: str = words("name or address of the primary", min_length=1, max_length=253, pattern=r"^[A-Za-z0-9_.:-]+$")
    port: int = words("", default=5432, ge=1, le=65535)
    user: str = words("a user with the attribute REPLICATION, and SELECT on the tables", min_length=1, max_length=63)
    password: Secret = words("the user's password", default=Secret(""))
    tls: Literal["disable", "require", "verify-ca", "verify-full"] = words("TLS of the connection", default="disable")
    tls_ca: str = words("file with the trusted certificates for verify-ca and verify-full", default="", max_length=4096)
    database: str = words("", min_length=1, max_length=63, pattern=_NAME)
    namespace: str = words("schema of the tables", default="public", min_length=1, max_length=63, pattern=_NAME)
    table: TableName | None = words("the captured table, with a primary key", default=None)
    tables: Annotated[tuple[TableName, ...], Field(max_length=1000)] = words(
        "several tables, captured by one engine", default=()
    )
    start: Literal["earliest", "latest"] = words(
        "a snapshot of the tables first, or only changes from now on", default="earliest"
    )
    on_loss: Literal["stop", "snapshot"] = words(
        "if the slot does not have the changes after the position: stop, or read the tables again",
        default="stop",
    )
    slot: str = words(
        "replication slot of this flow only; empty: derived from the flow's id", default="", pattern=_SLOT
    )
    publication: str = words(
        "publication of the tables; empty: created by the flow, with a name from its id", default="", pattern=_SLOT
    )
    heartbeat_seconds: int = words(
        "how often an idle capture confirms its position, so that the server can remove WAL", default=10, ge=1, le=3600
    )
    spool_mib: int = words(
        "size of changes that wait for the flow; when it is reached, the capture pauses", default=1024, ge=1, le=1 << 20
    )

    def local_paths(self) -> Iterator[tuple[str, str]]:
        if self.tls_ca:
            yield "tls_ca", self.tls_ca

    @property
    def place(self) -> str:
        return self.namespace


KIND: Final = SourceKind(
    "postgres",
    PostgresSource,
    "millrace.flows.sources.postgres.table:source_of",
    "millrace.flows.sources.postgres.table:reader_of",
    tables=True,
    transactional=True,
    feeder="millrace.flows.sources.postgres.table:feeder_of",
    release="millrace.flows.sources.postgres.table:release",
)
