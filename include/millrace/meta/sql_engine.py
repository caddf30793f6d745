"""The databases that the SQL meta store lies in, and what each needs so that writers take turns and a commit is on the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa

from millrace.base.errors import MetaAmbiguous, MetaUnavailable, UnsupportedVersion
from millrace.meta.tables import STATE

BUSY_SECONDS: Final = 10.0
"""How long a writer waits for another process's transaction, and for any answer of a server."""
IDLE_SECONDS: Final = 2
"""A transaction whose process says nothing for so long is rolled back by MariaDB: a process that was suspended in the midst
of a write keeps nobody from writing."""
UPGRADE_SECONDS: Final = 60
"""How long one process waits for another one that makes the tables."""

READ_ONLY_OPTIONS: Final = {"millrace_reads": True}
"""The option of a connection that writes nothing, and waits for no turn."""


@contextmanager
def transaction(engine: sa.Engine, *, read_only: bool = False) -> Iterator[sa.Connection]:
    """One transaction. What fails before its commit was not done (MetaUnavailable); what fails in it may stand (MetaAmbiguous)."""
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
                connection.invalidate()  # nobody knows what it is in the middle of
                if read_only:
                    raise
                raise MetaAmbiguous(
                    f"the meta store's commit got no answer ({error.orig}): read before you repeat"
                ) from error
    except sa.exc.DBAPIError as error:
        raise MetaUnavailable(f"the meta store cannot be used now ({error.orig}); nothing was done") from error


def sqlite_engine(url: str) -> sa.Engine:
    """SQLite in one file."""
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})
    sa.event.listen(engine, "connect", _durable)
    sa.event.listen(engine, "begin", _begin_immediate)
    return engine


def _durable(connection: Any, _record: Any) -> None:
    """Transactions are ours to begin, readers go beside a writer, a commit is on the disk."""
    connection.isolation_level = None
    for pragma in ("journal_mode=wal", "synchronous=full"):
        connection.execute(f"pragma {pragma}").close()


def _begin_immediate(connection: sa.Connection) -> None:
    """A writer takes its turn before it reads: otherwise what it read may be old when it writes, and SQLite fails it."""
    reads = connection.get_execution_options().get("millrace_reads")
    connection.exec_driver_sql("begin" if reads else "begin immediate")


def mariadb_engine(url: str, username: str, password: str, *, lock_table: sa.Table = STATE) -> sa.Engine:
    """A MariaDB at ``mariadb://host:port/database``; its tables are InnoDB's, its commits as durable as the server makes them.
    Writers take turns by the one row of the table `turn`."""
    place = sa.make_url(url).set(drivername="mariadb+pymysql", username=username or None, password=password or None)
    session = f"set innodb_lock_wait_timeout={int(BUSY_SECONDS)}, idle_transaction_timeout={IDLE_SECONDS}"
    arguments = {
        "connect_timeout": BUSY_SECONDS,
        "read_timeout": BUSY_SECONDS + 2,
        "write_timeout": BUSY_SECONDS,
        "init_command": session,
    }
    # Each connection returns to the pool behind a rollback; one that the server closed fails at its first statement.
    engine = sa.create_engine(place, connect_args=arguments, isolation_level="REPEATABLE READ")

    def take_the_row(connection: sa.Connection) -> None:
        """A writer takes its turn by the one row's lock before it reads anything: its reads are then as of its turn."""
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
    """Run the migrations that the database lacks, in the transaction that `db` is in. Raises UnsupportedVersion for tables
    of a newer build. Another room's tables in the same database have `migrations` and a `version_table` of their own."""
    from alembic import command
    from alembic.config import Config
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", migrations)
    config.attributes["connection"] = db
    steps = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(db, opts={"version_table": version_table}).get_current_revision()
    if found == steps.get_current_head():
        return
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise UnsupportedVersion(f"{whose} tables are of version {found}: use the build that made them") from error


def upgrade_exclusively(db: sa.Connection, upgrade: Callable[[sa.Connection], None] = upgrade) -> None:
    """Make or migrate the tables by `upgrade`, one process at a time. Raises UnsupportedVersion."""
    if db.dialect.name == "sqlite":  # the caller's transaction has the turn
        upgrade(db)
        return
    # MariaDB commits at each change of a table: a lock by name is what keeps others away.
    if db.execute(sa.text(f"select get_lock('millrace_meta', {UPGRADE_SECONDS})")).scalar() != 1:
        raise sa.exc.OperationalError("get_lock", {}, TimeoutError("another process has been making the tables"))
    try:
        upgrade(db)
        db.exec_driver_sql("commit")  # the number of its version, too, is there before the next one looks
    finally:
        db.execute(sa.text("select release_lock('millrace_meta')"))
