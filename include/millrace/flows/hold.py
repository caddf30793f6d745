"""A hold on flows: while a backup reads their positions and the end of the log, none of them sends anything new.

A flow sends a batch in two steps: it makes its journal durable, and sends what the journal has. Between the two it
calls :func:`wait_while_held`. The backup takes the hold first, and reads the journals then. So the log has, up to the
end that the backup reads during the hold, what the journals name, and nothing of a later batch.

Without a meta store the hold is a lock of the data folder, which the kernel releases with its process. With one it is a
key under a lease. Either way a flow waits for at most HOLD_SECONDS, and a backup that took longer begins again.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from millrace.base.deadline import Deadline
from millrace.base.errors import BackupBusy, MetaAmbiguous, MetaUnavailable
from millrace.base.failpoint import hit
from millrace.base.files import make_folder
from millrace.base.settings import Settings
from millrace.client.consume.membership import boot_clock

if TYPE_CHECKING:
    from millrace.meta.factory import ClosableMetaStore

HOLD_SECONDS: Final = 20.0
SPOOL_SECONDS: Final = 600.0
"""Longest time for which a backup keeps spools from being trimmed."""
KEY: Final = "backup/flows"
SPOOLS_KEY: Final = "backup/spools"
LOCK: Final = "flows.hold"
_POLL: Final = 0.02
_TAKE_SECONDS: Final = 5.0


def wait_while_held(settings: Settings) -> None:
    """Return when no backup holds the flows. Call it after a journal is durable, before anything of it is sent.

    Raises MetaUnavailable if the meta store cannot say.
    """
    end = Deadline.after(HOLD_SECONDS)
    if settings.meta_store:
        store = process_store(settings.meta_store)
        while store.get(KEY) is not None and end.pause(_POLL):
            pass
        return
    path = settings.run_path / LOCK
    if not path.exists():  # no backup was ever made: the file is there before the lock is taken
        return
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not _locked(handle, fcntl.LOCK_SH) and end.pause(_POLL):
            pass
    finally:
        os.close(handle)


@contextmanager
def flows_held(settings: Settings) -> Iterator[None]:
    """Hold the flows of the deployment inside.

    Raises BackupBusy if another backup holds them, or if they may have gone on before the end.
    """
    begun = boot_clock()  # goes on while the machine is suspended, as the flows of other machines do
    with _key_held(settings, KEY, HOLD_SECONDS) if settings.meta_store else _lock_held(settings):
        hit("flows.held")
        yield
        if boot_clock() - begun >= HOLD_SECONDS:
            raise BackupBusy(
                f"reading the positions of flows took longer than {HOLD_SECONDS:.0f} s, which they wait: try again"
            )


@contextmanager
def spools_held(settings: Settings) -> Iterator[None]:
    """Keep the owners of shared spools from storing them whole inside: that removes what lanes have passed.

    Raises BackupBusy if another backup does that, or if it took longer than SPOOL_SECONDS.
    """
    if not settings.meta_store:  # each spool is of this machine, and held by itself
        yield
        return
    begun = boot_clock()
    with _key_held(settings, SPOOLS_KEY, SPOOL_SECONDS):
        yield
        if boot_clock() - begun >= SPOOL_SECONDS:
            raise BackupBusy(f"reading the spools of captures took longer than {SPOOL_SECONDS:.0f} s: try again")


@contextmanager
def _lock_held(settings: Settings) -> Iterator[None]:
    make_folder(settings.run_path)
    handle = os.open(settings.run_path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = Deadline.after(_TAKE_SECONDS)
    try:
        while not _locked(handle, fcntl.LOCK_EX):
            if not end.pause(_POLL):
                raise BackupBusy("another backup holds the flows: try again")
        yield
    finally:
        os.close(handle)


@contextmanager
def _key_held(settings: Settings, key: str, seconds: float) -> Iterator[None]:
    from millrace.meta.store import Put, RevisionEquals

    store = process_store(settings.meta_store)
    lease = store.grant(seconds)
    try:
        with suppress(MetaAmbiguous):
            store.commit([Put(key, b"", lease)], when=[RevisionEquals(key, 0)])
        found = store.get(key)
        if found is None or found.lease != lease:
            raise BackupBusy("another backup is being made from another machine: try again")
        yield
        still = store.get(key)
        if still is None or still.lease != lease:
            raise BackupBusy("the backup's hold on the flows was lost: try again")
    finally:
        with suppress(MetaUnavailable, MetaAmbiguous):  # it ends by itself
            store.revoke(lease)


_opening: Final = threading.Lock()


def process_store(url: str) -> ClosableMetaStore:
    """Return this process's connection to the meta store. Thread-safe. Raises MetaUnavailable, UnsupportedVersion."""
    with _opening:
        return _opened(url, os.getpid())


@lru_cache(maxsize=4)
def _opened(url: str, process: int) -> ClosableMetaStore:
    from millrace.coord.clock import SystemClock
    from millrace.meta.factory import open_meta_store

    return open_meta_store(url, SystemClock().monotonic, env=os.environ)


def _locked(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
