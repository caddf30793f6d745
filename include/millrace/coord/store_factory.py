"""Opens the meta store that the settings name, guards a switch of the log against nodes, and holds the cluster's
secret.
"""

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
from millrace.coord.cluster_file import STORE_FILE, is_cluster
from millrace.coord.lease import LeasedKey
from millrace.coord.session import APPEND, NODE_PREFIX, NodeInfo
from millrace.meta.factory import ClosableMetaStore, open_meta_store
from millrace.meta.store import MetaStore
from millrace.rpc.wire import TOKEN_VARIABLE

TOKEN_FILE: Final = "cluster.token"
CATALOG_PREFIX: Final = "catalog/"
"""Prefix of the catalog's keys in the meta store (millrace.coord.catalog.shared)."""
CATALOG_GUARD_KEY: Final = "catalog/guard"
SWITCH_KEY: Final = "control/switch"
"""Key that exists, under a lease, while the log is being switched."""


def open_cluster_store(settings: Settings, clock: Clock) -> ClosableMetaStore:
    """Open the cluster's meta store. The embedded store is created if it is missing.

    Raises MetaUnavailable, UnsupportedVersion.
    """
    if settings.meta_store:
        return open_meta_store(settings.meta_store, clock.monotonic, env=os.environ)
    from millrace.meta.sql import SqlStore

    return SqlStore.in_file(settings.data_dir / "coord" / STORE_FILE, clock.monotonic)


def require_cluster(settings: Settings) -> None:
    """Raise InvalidSettings unless :func:`is_cluster`."""
    if not is_cluster(settings):
        raise InvalidSettings(
            f"{settings.data_dir} has no cluster: start one with `millrace coord` and `millrace node NAME`"
            " (docs/coordinator.md)"
        )


def _living(store: MetaStore, role: str | None = None) -> list[str]:
    found = (NodeInfo.decode(entry.value) for entry in store.list(NODE_PREFIX).entries)
    return sorted(info.name for info in found if role is None or role in info.roles)


def require_unused_store(settings: Settings) -> None:
    """Check that the meta store belongs to no other deployment, before a restore replaces this one.

    Raises LogBusy if nodes are alive in a meta store outside of the data folder.
    Raises InvalidSettings if that store has the catalog of a deployment.
    """
    if not settings.meta_store:
        return
    with open_cluster_store(settings, SystemClock()) as store:
        names = _living(store)
        taken = store.get(CATALOG_GUARD_KEY) is not None
    if names:
        raise LogBusy(
            f"nodes {', '.join(names)} of the meta store {settings.meta_store} are running: stop them, or use another"
            " store"
        )
    if taken:
        raise InvalidSettings(
            f"the meta store {settings.meta_store} has the catalog of a deployment: use another one (another"
            " database, another prefix"
            f" of etcd), or, if that deployment is gone, delete its keys under {CATALOG_PREFIX}"
        )


@contextmanager
def exclude_append_nodes(settings: Settings, clock: Clock | None = None) -> Iterator[Callable[[], None]]:
    """Keep nodes from taking appends inside this context, so that the log can move to another backend.

    Each node follows its own view of the log; appends during the switch would be lost to it.
    A mark in the meta store, under a lease, keeps new nodes away. The context yields a check: call it before each
    step that a node must not see half done.

    Raises LogBusy if a node takes appends already, if another process is inside, or (from the check) if the mark was
    lost.
    Raises MetaUnavailable.
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
            raise LogBusy("another process is switching the log: wait until it has finished")
        ended, taken = threading.Event(), mark.revision

        def keep() -> None:
            while mark.revision == taken and not ended.wait(mark.step()):
                pass

        def check() -> None:
            if mark.revision != taken or not mark.held():
                raise LogBusy(
                    "the mark that keeps nodes from taking appends was lost (this process slept, or the meta store"
                    " failed), so a node may"
                    " have started: drain and stop the nodes with the append role, then run the switch again to"
                    " complete it"
                )

        keeping = threading.Thread(target=keep, name="switch-mark", daemon=True)
        keeping.start()
        try:
            # Only after the mark is set: a node that starts now sees the mark before it opens a log.
            if names := _living(store, APPEND):
                raise LogBusy(
                    f"nodes {', '.join(names)} take appends: drain and stop them, switch the log, and start them again"
                )
            yield check
        finally:
            ended.set()
            keeping.join()
            mark.release()


def require_no_switch(store: MetaStore) -> None:
    """Raise LogBusy while the log is being switched. A node calls this before it takes appends."""
    if store.get(SWITCH_KEY) is not None:
        raise LogBusy("the log is being switched to another backend: start the node again when that has finished")


def cluster_token(settings: Settings) -> str:
    """Return the secret that every order carries.

    MILLRACE_SERVER_TOKEN if it is set, which nodes on several hosts need; otherwise a secret in the data folder.
    """
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
