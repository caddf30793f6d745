"""Changes where the tables of a deployment lie (millrace.base.settings.place), on every host of it.

As the settings that change while Millrace runs (millrace.coord.machine.settings): without a cluster, the file of the
data folder is changed. In a cluster, the meta store is, and each node and coordinator copies it into the file of its
machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import MetaUnavailable
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder
from millrace.base.settings import Settings
from millrace.base.settings.place import TablesPlace, place_path, read_place, write_place
from millrace.coord.clock import SystemClock
from millrace.coord.cluster_file import is_cluster
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import Entry, MetaStore, Put, RevisionEquals

PLACE_KEY: Final = "control/tables"
"""Key of the place in the meta store."""
_ATTEMPTS: Final = 100
_LOCK_SECONDS: Final = 30.0


def change_place(settings: Settings, change: Callable[[TablesPlace], TablesPlace]) -> TablesPlace:
    """Replace the place of the tables by what `change` makes of it, durably, and return it.

    `change` may be called again after another process's change; what it raises ends the call. Raises MetaUnavailable.
    """
    first = TablesPlace(settings.tables)
    if not is_cluster(settings):
        path = place_path(settings.data_dir)
        make_folder(path.parent)
        with exclusive_lock(path.with_suffix(".lock"), deadline=Deadline.after(_LOCK_SECONDS)):
            made = change(read_place(settings.data_dir) or first)
            write_place(settings.data_dir, made)
            return made
    with open_cluster_store(settings, SystemClock()) as store:
        for _ in range(_ATTEMPTS):
            there = store.get(PLACE_KEY)
            made = change(first if there is None else TablesPlace.decode(there.value))
            revision = 0 if there is None else there.modified
            if store.commit([Put(PLACE_KEY, made.encode())], when=[RevisionEquals(PLACE_KEY, revision)]) is not None:
                write_place(settings.data_dir, made)
                return made
    raise MetaUnavailable("other processes kept changing the place of the tables: retry")


@contextmanager
def reading_place(settings: Settings) -> Iterator[Callable[[], TablesPlace]]:
    """Yield a function that returns where the tables lie: in a cluster by the meta store, since this machine's copy may
    be old.

    The function raises MetaUnavailable, InvalidSettings, UnsupportedVersion.
    """

    def read() -> TablesPlace:
        return read_place(settings.data_dir) or TablesPlace(settings.tables)

    if not is_cluster(settings):
        yield read
        return
    with open_cluster_store(settings, SystemClock()) as store:

        def copied() -> TablesPlace:
            copy_place(settings, store)
            return read()

        yield copied


def copy_place(settings: Settings, store: MetaStore) -> None:
    """Copy the place in the meta store into this machine's file, if the tables were ever moved."""
    there: Entry | None = store.get(PLACE_KEY)
    if there is not None:
        write_place(settings.data_dir, TablesPlace.decode(there.value))
