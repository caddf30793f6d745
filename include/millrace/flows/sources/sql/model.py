"""The declaration of a database that is read by SQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final, Literal, Self

from pydantic import model_validator

from millrace.flows.declare.part import Part, Secret, words

PORTS: Final = {"mariadb": 3306, "postgres": 5432}
NAME: Final = r'^[^.`"\x00]+$'


class SqlDatabase(Part):
    """A database and its login."""

    engine: Literal["mariadb", "postgres", "sqlite"] = words("")
    host: str = words("name or address of the server", default="", max_length=253, pattern=r"^[A-Za-z0-9_.:-]*$")
    port: int = words("0: the engine's default", default=0, ge=0, le=65535)
    user: str = words("", default="", max_length=128)
    password: Secret = words("the user's password", default=Secret(""))
    tls: Literal["disable", "require", "verify-full"] = words("TLS of the connection", default="disable")
    tls_ca: str = words("file with the trusted certificates for verify-full", default="", max_length=4096)
    database: str = words("its name; for SQLite its file", min_length=1, max_length=4096)
    namespace: str = words("schema of PostgreSQL", default="public", min_length=1, max_length=63, pattern=NAME)

    @model_validator(mode="after")
    def _server(self) -> Self:
        if self.engine != "sqlite" and not (self.host and self.user):
            raise ValueError(f"{self.engine} needs host and user")
        return self

    def local_paths(self) -> Iterator[tuple[str, str]]:
        for field, path in (("database", self.database if self.engine == "sqlite" else ""), ("tls_ca", self.tls_ca)):
            if path:
                yield field, path

    @property
    def place(self) -> str:
        """The prefix of a table's name in its topic."""
        if self.engine == "postgres":
            return self.namespace
        return PurePath(self.database).stem if self.engine == "sqlite" else self.database

    @property
    def words(self) -> str:
        """Its engine and address, for messages."""
        if self.engine == "sqlite":
            return f"SQLite {self.database}"
        return (
            f"{'MariaDB' if self.engine == 'mariadb' else 'PostgreSQL'} {self.host}:{self.port or PORTS[self.engine]}"
        )
