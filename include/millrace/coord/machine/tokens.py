"""The tokens of a cluster: the meta store has the truth, and each machine's token file is a copy of it.

The entry is the file's content, whole, so a change is one compare-and-set. A machine takes it over within a second
(millrace.coord.machine.copies).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from millrace.access.token_file import Token, TokenFile
from millrace.base.errors import InvalidSettings, LogBusy
from millrace.base.settings import Settings
from millrace.coord.clock import SystemClock
from millrace.coord.store_factory import open_cluster_store, require_cluster
from millrace.meta.store import MetaStore, Put, RevisionEquals

TOKENS_KEY: Final = "access/tokens"


class SharedTokens(TokenFile):
    """The token file of this machine, whose changes go to the meta store first."""

    def __init__(self, settings: Settings, store: MetaStore) -> None:
        super().__init__(settings.data_dir)
        self._store = store
        self._revision = 0

    def refresh(self) -> None:
        """Take over what the store has. Raises MetaUnavailable, LogBusy."""
        found = self._store.get(TOKENS_KEY)
        if found is not None and found.modified != self._revision:
            with self._locked():
                self._take()

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        with self._locked():
            self._take()
            yield self.tokens()

    def _take(self) -> None:
        found = self._store.get(TOKENS_KEY)
        if found is not None:
            self._write(found.value)
        self._revision = 0 if found is None else found.modified

    def _replace(self, tokens: Sequence[Token]) -> None:
        content = self._encoded(tokens)
        written = self._store.commit([Put(TOKENS_KEY, content)], when=[RevisionEquals(TOKENS_KEY, self._revision)])
        if written is None:
            raise LogBusy("another machine changed the tokens at the same time: nothing was done, try again")
        self._revision = written
        self._write(content)


@contextmanager
def open_tokens(settings: Settings) -> Iterator[TokenFile]:
    """Yield the tokens of the deployment, to list and change them. Raises MetaUnavailable."""
    try:
        require_cluster(settings)
    except InvalidSettings:
        yield TokenFile(settings.data_dir)
        return
    with open_cluster_store(settings, SystemClock()) as store:
        tokens = SharedTokens(settings, store)
        tokens.refresh()
        yield tokens
