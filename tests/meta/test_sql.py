"""The SQL meta store beside the conformance suite.

Its file outlives it, wall clocks do not matter, failures are told apart.
"""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from millrace.base.errors import MetaAmbiguous, MetaUnavailable, UnsupportedVersion
from millrace.meta.sql import SqlStore
from millrace.meta.store import Put
from millrace.meta.tables import METADATA
from tests.meta.stores import Hand


def opened(folder: Path, clock: Hand | None = None) -> SqlStore:
    return SqlStore.in_file(folder / "deep" / "meta.db", clock or Hand())


def test_what_was_committed_is_there_when_the_store_is_opened_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        lease = store.grant(60.0)
        revision = store.commit([Put("a", b"1"), Put("leased", b"", lease)])
    with opened(tmp_path) as store:
        assert [entry.key for entry in store.list("", revision=revision).entries] == ["a", "leased"]
        store.renew(lease)
        assert store.grant(60.0) == lease + 1


def test_a_lease_ends_only_before_somebody_who_watched_it_for_its_length(tmp_path: Path) -> None:
    """A process that starts, or was stopped, has seen nothing of the time before: it must not take away what lives."""
    clock = Hand()
    with opened(tmp_path, clock) as owner, opened(tmp_path, clock) as observer:
        lease = owner.grant(10.0)
        owner.commit([Put("node", b"", lease)])
        observer.get("node")
        for _ in range(10):  # the observer sleeps, and looks once in a while, when renewals came in between
            clock.now += 9.0
            with sqlite3.connect(tmp_path / "deep" / "meta.db") as db:
                db.execute("update meta_lease set renewals = renewals + 1")
            clock.now += 9.0
            assert observer.get("node") is not None
    with opened(tmp_path, clock) as late:
        clock.now += 1_000.0
        assert late.get("node") is not None
        clock.now += 9.9
        assert late.get("node") is not None
        clock.now += 0.2
        assert late.get("node") is None


def test_a_lease_that_is_renewed_while_somebody_is_about_to_end_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Hand()
    with opened(tmp_path, clock) as owner, opened(tmp_path, clock) as observer:
        lease = owner.grant(10.0)
        owner.commit([Put("node", b"", lease)])
        observer.get("node")
        transaction = observer._transaction

        def late(*, reads: bool = False) -> AbstractContextManager[sa.Connection]:
            if not reads:  # the observer has seen that nobody renewed it; the renewal comes before it takes it away
                monkeypatch.undo()
                with sqlite3.connect(tmp_path / "deep" / "meta.db") as db:
                    db.execute("update meta_lease set renewals = renewals + 1")
            return transaction(reads=reads)

        monkeypatch.setattr(observer, "_transaction", late)
        clock.now += 10.5
        assert observer.get("node") is not None
        owner.renew(lease)


def test_the_migrations_make_the_tables_that_the_code_uses(tmp_path: Path) -> None:
    with opened(tmp_path):
        engine = sa.create_engine(f"sqlite:///{tmp_path / 'deep' / 'meta.db'}")
        with engine.connect() as db:
            context = MigrationContext.configure(db, opts={"version_table": "meta_version"})
            assert compare_metadata(context, METADATA) == []
        engine.dispose()


def test_tables_of_a_newer_build_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "deep" / "meta.db") as db:
        db.execute("update meta_version set version_num = '9999'")
    with pytest.raises(UnsupportedVersion, match="9999"):
        opened(tmp_path)


def test_a_commit_that_another_process_keeps_from_its_turn_was_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.meta.sql_engine.BUSY_SECONDS", 0.05)
    with opened(tmp_path) as store:
        db = sqlite3.connect(tmp_path / "deep" / "meta.db", isolation_level=None)
        db.execute("begin immediate")
        with pytest.raises(MetaUnavailable, match="locked"):
            store.commit([Put("a", b"")])
        assert store.get("a") is None
        db.execute("rollback")
        db.close()
        assert store.commit([Put("a", b"")]) is not None


def test_a_commit_whose_end_fails_is_ambiguous(tmp_path: Path) -> None:
    with opened(tmp_path) as store:

        def fails(connection: sa.Connection) -> None:
            if not connection.get_execution_options().get("millrace_reads"):
                raise sa.exc.OperationalError("commit", {}, OSError("disk I/O error"))

        sa.event.listen(store._engine, "commit", fails)
        with pytest.raises(MetaAmbiguous, match="read before you retry"):
            store.commit([Put("a", b"")])
        assert store.get("a") is None
