"""Copies of the meta store in each machine's data folder, whose files the machine's processes read.

The catalog, the changed settings and the tokens; and news of commits to tables on an object store, which it sends too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millrace.base.settings import Settings
from millrace.catalog.sqlite_file import catalog_path
from millrace.coord.catalog.shared import SharedCatalog
from millrace.coord.catalog.store import CatalogStore
from millrace.coord.clock import SystemClock
from millrace.coord.machine.settings import SettingsCopy
from millrace.coord.machine.table_news import TableNews
from millrace.coord.machine.tokens import SharedTokens
from millrace.coord.store_factory import open_cluster_store
from millrace.meta.store import MetaStore
from millrace.runtime.periodic import PeriodicTask

COPY_SECONDS: Final = 1.0
"""Seconds between two looks at the catalog and the tokens."""


class CatalogCopy(PeriodicTask):
    """Keeps this machine's file of the catalog up to date, from :meth:`start` to :meth:`close`."""

    def __init__(self, settings: Settings) -> None:
        """Copy the catalog; if the meta store is unavailable, the last copy stays.

        Raises InvalidSettings if the store has another deployment's catalog; UnsupportedVersion.
        """
        super().__init__(name="catalog-copy", interval=COPY_SECONDS)
        shared = SharedCatalog(open_cluster_store(settings, SystemClock()), follow_only=True)
        self._catalog = CatalogStore(catalog_path(settings.data_dir), shared=shared)

    def run_once(self) -> None:
        self._catalog.refresh()

    def close(self) -> None:
        super().close()
        self._catalog.close()


class _TokensCopy(PeriodicTask):
    def __init__(self, settings: Settings, store: MetaStore) -> None:
        super().__init__(name="tokens-copy", interval=COPY_SECONDS, run_at_start=True)
        self._tokens = SharedTokens(settings, store)

    def run_once(self) -> None:
        self._tokens.refresh()


@contextmanager
def following(settings: Settings, store: MetaStore | None = None) -> Iterator[None]:
    """Keep this machine's copies up to date inside this context. Does nothing if the meta store is local: then there is
    one machine.

    `store` is opened if it is None, and closed at the end. Raises what :class:`CatalogCopy` raises; MetaUnavailable.
    """
    if store is None:
        with open_cluster_store(settings, SystemClock()) as opened, following(settings, opened):
            yield
        return
    tasks = [SettingsCopy(settings, store), _TokensCopy(settings, store), TableNews(settings, store)]
    if settings.meta_store:
        tasks.append(CatalogCopy(settings))
    try:
        for each in tasks:
            each.start()
        yield
    finally:
        for each in tasks:
            each.close()
