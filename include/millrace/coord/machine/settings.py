"""Changes settings while Millrace runs (millrace.base.settings.live), on every host of a deployment.

Without a cluster, the file of the data folder is changed. In a cluster, the meta store is, and each node and
coordinator copies it into its machine's file within a second. A change is checked whole before it is stored; two
changes at once are made one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidSettings, MetaUnavailable
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder
from millrace.base.settings import Settings
from millrace.base.settings.live import ChangedSettings, live_settings_path, read_changed, write_changed
from millrace.coord.clock import SystemClock
from millrace.coord.machine.tables_place import copy_place
from millrace.coord.store_factory import open_cluster_store, require_cluster
from millrace.meta.store import Entry, MetaStore, Put, RevisionEquals
from millrace.runtime.periodic import PeriodicTask

SETTINGS_KEY: Final = "control/settings"
"""Key of the changed settings in the meta store."""
COPY_SECONDS: Final = 1.0
"""Seconds between two looks at the meta store."""
ATTEMPTS: Final = 100
_LOCK_SECONDS: Final = 30.0


def change_settings(
    settings: Settings,
    *,
    put: Mapping[str, str] | None = None,
    remove: Iterable[str] = (),
    check: Callable[[Settings], object] = lambda settings: None,
) -> Settings:
    """Change settings of the running deployment, and return those that it has then.

    `put` has values as text; `remove` names settings that get back the value of each process's environment and file.
    `check` gets the resulting settings, and raises if they cannot be used together.

    Raises InvalidSettings, what `check` raises, MetaUnavailable: nothing was changed.
    """

    def changed(before: ChangedSettings) -> tuple[ChangedSettings, Settings]:
        left = {name: text for name, text in before.values.items() if name not in set(remove)}
        made = ChangedSettings(left | dict(put or {}), time.time())
        result = made.applied_to(settings)
        check(result)
        return made, result

    try:
        require_cluster(settings)
    except InvalidSettings:
        return _change_file(settings, changed)
    with open_cluster_store(settings, SystemClock()) as store:
        return _change_store(settings, store, changed)


_Change = Callable[[ChangedSettings], tuple[ChangedSettings, Settings]]


def _change_file(settings: Settings, change: _Change) -> Settings:
    path = live_settings_path(settings)
    make_folder(path.parent)
    with exclusive_lock(path.with_suffix(".lock"), deadline=Deadline.after(_LOCK_SECONDS)):
        made, result = change(read_changed(settings))
        write_changed(settings, made)
        return result


def _change_store(settings: Settings, store: MetaStore, change: _Change) -> Settings:
    for _ in range(ATTEMPTS):
        there = store.get(SETTINGS_KEY)
        made, result = change(_decode(there))
        revision = 0 if there is None else there.modified
        if store.commit([Put(SETTINGS_KEY, made.encode())], when=[RevisionEquals(SETTINGS_KEY, revision)]) is not None:
            write_changed(settings, made)
            return result
    raise MetaUnavailable("other changes of the settings kept coming: nothing was changed, retry")


def _decode(entry: Entry | None) -> ChangedSettings:
    return ChangedSettings({}) if entry is None else ChangedSettings.decode(entry.value)


class SettingsCopy(PeriodicTask):
    """Copies the meta store's settings and the place of the tables into this machine's files, from :meth:`start` to
    :meth:`close`.
    """

    def __init__(self, settings: Settings, store: MetaStore) -> None:
        super().__init__(name="settings", interval=COPY_SECONDS, run_at_start=True)
        self._settings = settings
        self._store = store

    def run_once(self) -> None:
        there = self._store.get(SETTINGS_KEY)
        if there is not None:
            write_changed(self._settings, _decode(there))
        copy_place(self._settings, self._store)
