"""SQLAlchemy engines for the SQL meta store: serialised writers, durable commits, migrations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import sqlalchemy as sa

from millrace.base.errors import MetaAmbiguous, MetaUnavailable, UnsupportedVersion
from millrace.meta.tables import STATE

BUSY_SECONDS: Final = 10.0
"""Time that a writer waits for another process's transaction, and for any answer of a server."""
IDLE_SECONDS: Final = 2
"""MariaDB rolls back a transaction that is idle for this long.

Otherwise a process suspended during a write would block all other writers.
"""
UPGRADE_SECONDS: Final = 60
"""Time that a process waits for another one that creates or migrates the tables."""

P = ParamSpec("P")
T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

READ_ONLY_OPTIONS: Final = {"millrace_reads": True}
"""The options of a connection that does not write and so does not wait for its turn."""


@contextmanager
def transaction(engine: sa.Engine, *, read_only: bool = False) -> Iterator[sa.Connection]:
    """Run one transaction.

    Raises MetaUnavailable if it failed before its commit: nothing was done.
    Raises MetaAmbiguous if the commit itself failed: it may have taken effect.
    """
    try:
        connection = engine.connect().execution_options(**(READ_ONLY_OPTIONS if read_only else {}))
        with connection:
            begun = connection.begin()
            try:
                yield connection
            except BaseException:
                begun.rollback()
                raise
            try:
                begun.commit()
            except sa.exc.DBAPIError as error:
                connection.invalidate()  # its state is unknown
                if read_only:
                    raise
                raise MetaAmbiguous(
                    f"the meta store's commit got no answer ({error.orig}): read before you retry"
                ) from error
    except sa.exc.DBAPIError as error:
        raise MetaUnavailable(f"the meta store cannot be used now ({error.orig}); nothing was done") from error


def on_a_new_connection(call: Callable[P, T]) -> Callable[P, T]:
    """Repeat `call` once if the server had ended its connection before the commit, so that nothing was done.

    A server ends idle connections of a pool, all of them when it restarts, and those of a process that stood still for
    IDLE_SECONDS in a transaction. The second failure is raised.
    """

    @wraps(call)
    def repeated(*args: P.args, **options: P.kwargs) -> T:
        try:
            return call(*args, **options)
        except MetaUnavailable as error:
            cause = error.__cause__
            if not (isinstance(cause, sa.exc.DBAPIError) and cause.connection_invalidated):
                raise
            _log.info("the meta store's server had ended a connection, trying a new one: %s", cause.orig)
        return call(*args, **options)

    return repeated


def sqlite_engine(url: str) -> sa.Engine:
    """Return an engine for one SQLite file."""
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})
    sa.event.listen(engine, "connect", _durable)
    sa.event.listen(engine, "begin", _begin_immediate)
    return engine


def _durable(connection: Any, _record: Any) -> None:
    """Begin transactions explicitly, let readers run beside a writer, and sync each commit."""
    connection.isolation_level = None
    for pragma in ("journal_mode=wal", "synchronous=full"):
        connection.execute(f"pragma {pragma}").close()


def _begin_immediate(connection: sa.Connection) -> None:
    """Take the write lock before reading: otherwise a read may be stale at the write, and SQLite fails the write."""
    reads = connection.get_execution_options().get("millrace_reads")
    connection.exec_driver_sql("begin" if reads else "begin immediate")


def mariadb_engine(url: str, username: str, password: str, *, lock_table: sa.Table = STATE) -> sa.Engine:
    """Return an engine for ``mariadb://host:port/database``.

    Its tables are InnoDB's; its commits are as durable as the server makes them.
    Writers lock the one row of `lock_table` to take turns.
    """
    place = sa.make_url(url).set(drivername="mariadb+pymysql", username=username or None, password=password or None)
    session = f"set innodb_lock_wait_timeout={int(BUSY_SECONDS)}, idle_transaction_timeout={IDLE_SECONDS}"
    arguments = {
        "connect_timeout": BUSY_SECONDS,
        "read_timeout": BUSY_SECONDS + 2,
        "write_timeout": BUSY_SECONDS,
        "init_command": session,
    }
    # A connection returns to the pool after a rollback; one that the server closed fails at its first statement.
    engine = sa.create_engine(place, connect_args=arguments, isolation_level="REPEATABLE READ")

    def take_the_row(connection: sa.Connection) -> None:
        """Lock the row before the first read of a writer, so that its reads are current."""
        if not connection.get_execution_options().get("millrace_reads"):
            connection.execute(sa.select(lock_table.c.id).with_for_update()).all()

    sa.event.listen(engine, "begin", take_the_row)
    return engine


def upgrade(
    db: sa.Connection,
    *,
    migrations: str = "millrace.meta:migrations",
    version_table: str = "meta_version",
    whose: str = "the meta store's",
) -> None:
    """Run the migrations that the database lacks, in the current transaction of `db`.

    Other tables in the same database have `migrations` and a `version_table` of their own.
    Raises UnsupportedVersion if a newer build wrote the tables.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", migrations)
    config.attributes["connection"] = db
    steps = ScriptDirectory.from_config(config)
    newest = steps.get_current_head()  # loads files: before the transaction begins, which may not stand idle
    found = MigrationContext.configure(db, opts={"version_table": version_table}).get_current_revision()
    if found == newest:
        return
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise UnsupportedVersion(f"{whose} tables have version {found}: use the build that wrote them") from error


def upgrade_exclusively(db: sa.Connection, upgrade: Callable[[sa.Connection], None] = upgrade) -> None:
    """Create or migrate the tables with `upgrade`, in one process at a time. Raises UnsupportedVersion."""
    if db.dialect.name == "sqlite":  # the caller's transaction holds the write lock
        upgrade(db)
        return
    # MariaDB commits at each DDL statement, so only a named lock keeps other processes out.
    if db.execute(sa.text(f"select get_lock('millrace_meta', {UPGRADE_SECONDS})")).scalar() != 1:
        raise sa.exc.OperationalError("get_lock", {}, TimeoutError("another process is creating the tables"))
    try:
        upgrade(db)
        db.exec_driver_sql("commit")  # the version number must be visible before the lock is released
    finally:
        if not db.invalidated:  # else the lock has ended with the connection
            db.execute(sa.text("select release_lock('millrace_meta')"))
