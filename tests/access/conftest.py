"""A running deployment with tokens of every kind, and links to its server by each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
from millrace.base.settings import Settings
from millrace.client.database import Database, connect
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc.discovery import ServerRecord, read_record
from millrace.rpc.link import Link, Watchdog

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
MACHINE_TOKEN = "a-token-that-both-sides-have"
NARROW = ("users", "pchannel:elsewhere", "vchannel:elsewhere", "group:elsewhere")
"""What narrow tokens are for: one collection, and things that are not there."""


@dataclass(frozen=True)
class Guarded:
    """A deployment with the collections ``users`` and ``orders``, both on all PChannels."""

    client: Database
    address: str

    @property
    def tokens(self) -> TokenFile:
        return TokenFile(self.client.settings.data_dir)

    def add(self, name: str, *grants: Grant, expires: float | None = None) -> str:
        return self.tokens.add(name, grants, expires=expires)[0]

    @contextmanager
    def link(self, token: str) -> Iterator[Link]:
        watchdog = Watchdog()
        link = Link(ServerRecord.remote(self.address, token), watchdog)
        try:
            yield link
        finally:
            link.close()
            watchdog.close()


@pytest.fixture(scope="package")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Guarded]:
    def begin() -> Guarded:
        folder: Path = tmp_path_factory.mktemp("guarded")
        settings = Settings(
            data_dir=folder / "data", cache_dir=folder / "cache", append_retry_delay=0.05, append_deadline=10.0
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MILLRACE_SERVER_TOKEN", MACHINE_TOKEN)
            client = connect(settings=settings)
        client.catalog.ensure_pchannels(2)
        for name in ("users", "orders"):
            client.catalog.create_collection(name, SCHEMA, vchannels=2)
        record = read_record(settings.log_path)
        assert record is not None
        return Guarded(client, record.address)

    return begin


@pytest.fixture(scope="package")
def guarded(start: Callable[[], Guarded]) -> Iterator[Guarded]:
    made = start()
    yield made
    with made.client:
        made.client.connection.service.shutdown()


@pytest.fixture(scope="package")
def tokens(guarded: Guarded) -> dict[str, str]:
    """A token for each role over everything and over little; and those that are worth nothing."""
    given = {str(role): guarded.add(str(role), Grant(role)) for role in Role}
    given |= {f"narrow {role}": guarded.add(f"narrow-{role}", Grant(role, NARROW)) for role in Role}
    guarded.add("revoked", Grant(Role.ADMIN))
    revoked = guarded.add("again", Grant(Role.ADMIN))
    guarded.tokens.revoke("again")
    return given | {"none": "", "wrong": "x" * 43, "revoked": revoked}
