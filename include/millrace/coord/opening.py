"""The meta store that the settings name, and the secret by which the processes of a cluster know each other."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.coord.clock import Clock
from millrace.meta.sql import SqlStore
from millrace.rpc.wire import TOKEN_VARIABLE

STORE_FILE: Final = "cluster.db"
TOKEN_FILE: Final = "cluster.token"


def open_store(settings: Settings, clock: Clock) -> SqlStore:
    """The cluster's meta store; the embedded one is made where it is not there. Raises MetaUnavailable, UnsupportedVersion."""
    if settings.meta_store:
        return SqlStore(settings.meta_store, clock.monotonic)
    return SqlStore.in_file(settings.data_dir / "coord" / STORE_FILE, clock.monotonic)


def require_cluster(settings: Settings) -> None:
    """Raises InvalidSettings where no process of a cluster was at work in this data folder: looking makes no store."""
    if not settings.meta_store and not (settings.data_dir / "coord" / STORE_FILE).exists():
        raise InvalidSettings(
            f"{settings.data_dir} is no cluster's: start one with `millrace coord` and `millrace node NAME` (docs/coordinator.md)"
        )


def cluster_token(settings: Settings) -> str:
    """What every order carries: MILLRACE_SERVER_TOKEN where nodes lie on several hosts, else a secret in the data folder."""
    given = os.environ.get(TOKEN_VARIABLE, "")
    if given:
        return given
    path = settings.run_path / TOKEN_FILE
    with suppress(FileNotFoundError):
        return path.read_text(encoding="ascii")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{TOKEN_FILE}.{os.getpid()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, secrets.token_urlsafe(32).encode())
        with suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        os.close(handle)
        draft.unlink()
    return path.read_text(encoding="ascii")
