"""The meta store that the settings name, and the secret by which the processes of a cluster know each other."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import Final

from millrace.base.errors import InvalidSettings, LogBusy
from millrace.base.settings import Settings
from millrace.coord.clock import Clock, SystemClock
from millrace.coord.session import APPEND, NODES, NodeInfo, moving_roles
from millrace.meta.opening import OpenStore, open_meta_store
from millrace.rpc.wire import TOKEN_VARIABLE

STORE_FILE: Final = "cluster.db"
TOKEN_FILE: Final = "cluster.token"


def open_store(settings: Settings, clock: Clock) -> OpenStore:
    """The cluster's meta store; the embedded one is made where it is not there. Raises MetaUnavailable, UnsupportedVersion."""
    if settings.meta_store:
        return open_meta_store(settings.meta_store, clock.monotonic, env=os.environ)
    from millrace.meta.sql import SqlStore

    return SqlStore.in_file(settings.data_dir / "coord" / STORE_FILE, clock.monotonic)


def require_cluster(settings: Settings) -> None:
    """Raises InvalidSettings where no process of a cluster was at work in this data folder: looking makes no store."""
    if not settings.meta_store and not (settings.data_dir / "coord" / STORE_FILE).exists():
        raise InvalidSettings(
            f"{settings.data_dir} is no cluster's: start one with `millrace coord` and `millrace node NAME` (docs/coordinator.md)"
        )


def require_no_appending_nodes(settings: Settings) -> None:
    """Raises LogBusy where nodes of a cluster take appends: the log goes on in another backend without them, since each follows its
    own view of it."""
    if APPEND not in moving_roles(settings.log):
        return
    try:
        require_cluster(settings)
    except InvalidSettings:
        return
    with open_store(settings, SystemClock()) as store:
        found = (NodeInfo.decoded(entry.value) for entry in store.list(NODES).entries)
        names = sorted(info.name for info in found if APPEND in info.roles)
    if names:
        raise LogBusy(
            f"the nodes {', '.join(names)} take what is appended: drain and stop them, switch the log, and start them again"
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
