"""The meta store that the settings name, and the secret by which the processes of a cluster know each other."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from millrace.base.errors import InvalidSettings, LogBusy
from millrace.base.settings import Settings
from millrace.coord.clock import Clock, SystemClock
from millrace.coord.lease import LeasedKey
from millrace.coord.session import APPEND, NODE_PREFIX, NodeInfo
from millrace.meta.factory import ClosableMetaStore, open_meta_store
from millrace.meta.store import MetaStore
from millrace.rpc.wire import TOKEN_VARIABLE

STORE_FILE: Final = "cluster.db"
TOKEN_FILE: Final = "cluster.token"
CATALOG_PREFIX: Final = "catalog/"
"""There, in a store that the settings name, is the catalog (millrace.coord.shared_catalog)."""
CATALOG_GUARD_KEY: Final = "catalog/guard"
SWITCH_KEY: Final = "control/switch"
"""There, under a lease, while the log is being switched."""


def open_cluster_store(settings: Settings, clock: Clock) -> ClosableMetaStore:
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


def _living(store: MetaStore, role: str | None = None) -> list[str]:
    found = (NodeInfo.decode(entry.value) for entry in store.list(NODE_PREFIX).entries)
    return sorted(info.name for info in found if role is None or role in info.roles)


def require_unused_store(settings: Settings) -> None:
    """For what puts another deployment in its place: raises LogBusy where nodes live in a meta store outside of the data folder,
    InvalidSettings where that has the catalog of a deployment."""
    if not settings.meta_store:
        return
    with open_cluster_store(settings, SystemClock()) as store:
        names = _living(store)
        taken = store.get(CATALOG_GUARD_KEY) is not None
    if names:
        raise LogBusy(
            f"the nodes {', '.join(names)} of the meta store {settings.meta_store} are at work: stop them first, or name another one"
        )
    if taken:
        raise InvalidSettings(
            f"the meta store {settings.meta_store} has the catalog of a deployment: name another one (another database, another prefix"
            f" of etcd), or, where that deployment is gone, delete its keys under {CATALOG_PREFIX}"
        )


@contextmanager
def exclude_append_nodes(settings: Settings, clock: Clock | None = None) -> Iterator[Callable[[], None]]:
    """No node takes appends inside, one that starts meanwhile neither: the log goes on in another backend, and each node follows its
    own view of it.

    A mark in the meta store keeps nodes away, under a lease. The answer is a check to call before each step that a node must not
    see half done: it raises LogBusy once the mark was lost, however shortly. Raises LogBusy where nodes take appends already, or
    another process is inside; MetaUnavailable.
    """
    try:
        require_cluster(settings)
    except InvalidSettings:
        yield lambda: None
        return
    clock = clock or SystemClock()
    with open_cluster_store(settings, clock) as store:
        mark = LeasedKey(store, clock, key=lambda lease: SWITCH_KEY, value=b"", seconds=settings.session_seconds)
        mark.step()
        if not mark.lease:
            store.get(SWITCH_KEY)
            raise LogBusy("another process is switching the log: wait for its end")
        ended, taken = threading.Event(), mark.revision

        def keep() -> None:
            while mark.revision == taken and not ended.wait(mark.step()):
                pass

        def check() -> None:
            if mark.revision != taken or not mark.held():
                raise LogBusy(
                    "the mark that keeps nodes from taking appends was lost (this process slept, or the meta store was away), so one may"
                    " have started: drain and stop the nodes with the append role, and run the switch again, which completes it"
                )

        keeping = threading.Thread(target=keep, name="switch-mark", daemon=True)
        keeping.start()
        try:
            # Behind the mark: a node that comes now finds it before it opens anything.
            if names := _living(store, APPEND):
                raise LogBusy(
                    f"the nodes {', '.join(names)} take what is appended: drain and stop them, switch the log, and start them again"
                )
            yield check
        finally:
            ended.set()
            keeping.join()
            mark.release()


def require_no_switch(store: MetaStore) -> None:
    """Raises LogBusy while the log is being switched: for a node that is to take appends."""
    if store.get(SWITCH_KEY) is not None:
        raise LogBusy("the log is being switched to another backend: no node takes appends until that is done")


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
