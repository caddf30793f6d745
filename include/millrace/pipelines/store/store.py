"""The store of pipelines: SQLite embedded, or MariaDB where the meta store is one. Each call is one transaction.

Concurrent edits: a change names the version that it was made from, and the later one raises PipelineConflict. Of each
pipeline the newest MAX_EVENTS lines of history stay, and MAX_DELETED_EVENTS of each deleted one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from millrace.access.grants import Grant, ResourceKind
from millrace.base.closeable import Closeable
from millrace.base.correlation import REQUEST_ID
from millrace.base.errors import (
    InvalidArgument,
    InvalidSettings,
    PipelineBusy,
    PipelineConflict,
    PipelineExists,
    PipelineNotFound,
    QuotaExceeded,
)
from millrace.base.settings import Settings
from millrace.flows.declare.keys import FILE as KEY_FILE
from millrace.flows.declare.keys import VARIABLE as KEY_VARIABLE
from millrace.flows.declare.keys import Keys
from millrace.meta.factory import PASSWORD_VARIABLE, USERNAME_VARIABLE
from millrace.meta.sql_engine import mariadb_engine, sqlite_engine, transaction, upgrade, upgrade_exclusively
from millrace.pipelines.store.records import DEFAULT_QUOTA, STOPPED, Event, Phase, PipelineRole, Quota, Record
from millrace.pipelines.store.tables import EVENT, PIPELINE, QUOTA, ROLE, SECRET, TURN
from millrace.pipelines.store.taking_over import take_over, was_taken_over

FILE: Final = "pipelines/pipelines.db"
MAX_EVENTS: Final = 500
MAX_DELETED_EVENTS: Final = 5_000
"""The most lines of history of all deleted pipelines together."""
MAX_ROLES: Final = 200
"""The most users with roles on one pipeline."""
MAX_QUOTAS: Final = 10_000
QUOTAS: Final = "*quotas"
KEYS: Final = "*keys"
"""The name in lines of history that do not belong to a pipeline."""

_upgrade = partial(
    upgrade,
    migrations="millrace.pipelines.store:migrations",
    version_table="pipeline_schema",
    whose="the pipelines'",
)


def open_pipelines(settings: Settings, *, env: Mapping[str, str] = os.environ) -> PipelineStore:
    """Open the store that the settings name: the meta store's MariaDB or SQLite.

    An etcd holds no tables, so with one, as without a meta store, it is SQLite in the data folder. If the settings name
    a new place, the pipelines of the data folder are moved there.

    Raises MetaUnavailable, UnsupportedVersion, PipelineExists (both have one of the same id), and InvalidSettings if
    the settings no longer name the place to which the pipelines were moved, or if the keys of their secrets would be
    lost with this pod.
    """
    keys = Keys(settings.data_dir, env=env)
    keys.require_lasting()
    url, path = settings.meta_store, settings.data_dir / FILE
    own = f"sqlite:///{path}"
    if url.startswith("mariadb:"):
        store = PipelineStore(
            mariadb_engine(url, env.get(USERNAME_VARIABLE, ""), env.get(PASSWORD_VARIABLE, ""), lock_table=TURN), keys
        )
    elif url.startswith("sqlite:") and url != own:
        store = PipelineStore(sqlite_engine(url), keys)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        return PipelineStore(sqlite_engine(own), keys)
    if path.is_file():
        try:
            store.take_over(sqlite_engine(own))
        except BaseException:
            store.close()
            raise
    return store


def may_have_pipelines(settings: Settings) -> bool:
    """Return whether pipelines may exist: in a database here, or in one that only its server knows. Creates nothing."""
    url = settings.meta_store
    if url.startswith("mariadb:"):
        return True
    path = url.removeprefix("sqlite:///") if url.startswith("sqlite:") else settings.data_dir / FILE
    return Path(path).is_file()


class PipelineStore(Closeable):
    """Stores pipelines.

    Calls raise MetaUnavailable if nothing was done; writes raise MetaAmbiguous if the result is unknown.
    """

    def __init__(self, engine: sa.Engine, keys: Keys, *, clock: Callable[[], float] = time.time) -> None:
        """Create or migrate the tables. Raises MetaUnavailable, UnsupportedVersion."""
        self._engine, self._keys, self._clock = engine, keys, clock
        try:
            with transaction(engine, read_only=engine.dialect.name != "sqlite") as db:
                upgrade_exclusively(db, _upgrade)
                if was_taken_over(db):
                    raise InvalidSettings(
                        "the pipelines of this data folder were moved to the database that MILLRACE_META_STORE named:"
                        " set it again"
                    )
        except BaseException:
            engine.dispose()
            raise

    def close(self) -> None:
        self._engine.dispose()

    def take_over(self, old: sa.Engine) -> None:
        """Move the pipelines of `old` into this store (millrace.pipelines.store.taking_over), and close `old`."""
        try:
            take_over(old, self._engine, _upgrade)
        finally:
            old.dispose()

    def _reading(self) -> AbstractContextManager[sa.Connection]:
        return transaction(self._engine, read_only=True)

    def _writing(self) -> AbstractContextManager[sa.Connection]:
        return transaction(self._engine)

    # --- pipelines ---------------------------------------------------------------------------------------------------

    def create(
        self, declaration: Mapping[str, Any], *, secrets: Mapping[str, str], who: str, saga: Mapping[str, Any]
    ) -> Record:
        """Store a new pipeline, CREATING, wanted STOPPED, with `who` as its owner. `declaration` must be checked.

        Raises PipelineExists, QuotaExceeded, InvalidSettings (no key for its secrets).
        """
        encrypted = self._encrypted(secrets)
        now, values = self._clock(), _columns(declaration)
        with self._writing() as db:
            if db.execute(sa.select(PIPELINE.c.id).where(PIPELINE.c.id == declaration["id"])).first() is not None:
                raise PipelineExists(f"a pipeline {declaration['id']!r} already exists")
            _check_quota(db, values["account"], values["cpus"], values["memory_mib"])
            row = {
                **values,
                "id": declaration["id"],
                "version": 1,
                "phase": Phase.CREATING,
                "wanted": STOPPED,
                "saga": _text(saga),
                "created_by": who,
                "created_at": now,
                "changed_at": now,
            }
            db.execute(sa.insert(PIPELINE).values(**row))
            _put_secrets(db, declaration["id"], encrypted)
            owner = {"pipeline": declaration["id"], "principal": who, "role": PipelineRole.OWNER}
            db.execute(
                sa.delete(ROLE).where(ROLE.c.pipeline == declaration["id"])
            )  # roles of a deleted pipeline of this name
            db.execute(sa.insert(ROLE).values(**owner))
            self._note(db, declaration["id"], who, "create", {"version": 1})
            return _record(_row(db, declaration["id"]))

    def _encrypted(self, secrets: Mapping[str, str]) -> dict[str, bytes]:
        """Encrypt secrets by path. Raises InvalidSettings if a new key would be made beside secrets of a lost one."""
        if secrets and not self._keys.exist:
            with self._reading() as db:
                known = db.execute(sa.select(SECRET.c.pipeline).limit(1)).scalar()
            if known is not None:
                raise InvalidSettings(
                    f"the key that encrypted the secrets of {known!r} and others is gone: bring {KEY_FILE} back from a"
                    f" copy, or set {KEY_VARIABLE} (`millrace flows service new-key` makes a key) and give them anew"
                )
        return {path: self._keys.encrypt(text) for path, text in secrets.items()}

    def ping(self) -> None:
        """Check the connection to the database. Raises MetaUnavailable."""
        with self._reading() as db:
            db.execute(sa.select(PIPELINE.c.id).limit(1))

    def get(self, pipeline: str) -> Record:
        """Raises PipelineNotFound."""
        with self._reading() as db:
            return _record(_row(db, pipeline))

    def all(self) -> list[Record]:
        """Return all pipelines, by id."""
        with self._reading() as db:
            return [_record(row) for row in db.execute(sa.select(PIPELINE).order_by(PIPELINE.c.id))]

    def update(
        self,
        pipeline: str,
        declaration: Mapping[str, Any],
        *,
        version: int,
        secrets: Mapping[str, str],
        who: str,
        detail: Mapping[str, Any],
    ) -> Record:
        """Replace the declaration of `version`, and all secrets by `secrets`.

        Raises PipelineNotFound, PipelineBusy, PipelineConflict, QuotaExceeded.
        """
        encrypted = self._encrypted(secrets)
        with self._writing() as db:
            row = _ready(db, pipeline)
            _check_version(row, version)
            values = _columns(declaration)
            _check_quota(db, values["account"], values["cpus"], values["memory_mib"], without=pipeline)
            values |= {"version": row.version + 1, "changed_at": self._clock()}
            db.execute(sa.update(PIPELINE).where(PIPELINE.c.id == pipeline).values(**values))
            db.execute(sa.delete(SECRET).where(SECRET.c.pipeline == pipeline))
            _put_secrets(db, pipeline, encrypted)
            self._note(db, pipeline, who, "update", {"version": row.version + 1, **detail})
            return _record(_row(db, pipeline))

    def want(self, pipeline: str, wanted: str, *, who: str, what: str) -> Record:
        """Store the wanted state (RUNNING, PAUSED, STOPPED), call and caller. Raises PipelineNotFound, PipelineBusy."""
        with self._writing() as db:
            _ready(db, pipeline)
            db.execute(sa.update(PIPELINE).where(PIPELINE.c.id == pipeline).values(wanted=wanted))
            self._note(db, pipeline, who, what, {})
            return _record(_row(db, pipeline))

    def move(
        self, was: Record, *, phase: Phase, saga: Mapping[str, Any], who: str = "", what: str = "", **detail: Any
    ) -> Record:
        """Replace phase and saga of `was`, and add a line to the history if `what` is given.

        Raises PipelineNotFound, and PipelineConflict if another process has changed it, or if it should run now.
        """
        with self._writing() as db:
            _unmoved(db, was)
            moved = sa.update(PIPELINE).where(PIPELINE.c.id == was.id)
            db.execute(moved.values(phase=phase, saga=_text(saga)))
            if what:
                self._note(db, was.id, who, what, detail)
            return _record(_row(db, was.id))

    def remove(self, was: Record, *, who: str, what: str, **detail: Any) -> None:
        """Remove a pipeline, its secrets and roles. A bounded part of its history stays. Raises as :meth:`move`."""
        with self._writing() as db:
            _unmoved(db, was)
            for table in (SECRET, ROLE):
                db.execute(sa.delete(table).where(table.c.pipeline == was.id))
            db.execute(sa.delete(PIPELINE).where(PIPELINE.c.id == was.id))
            self._note(db, was.id, who, what, detail)
            gone = sa.select(EVENT.c.id).where(EVENT.c.pipeline.not_in(sa.select(PIPELINE.c.id)))
            oldest = db.execute(gone.order_by(EVENT.c.id.desc()).offset(MAX_DELETED_EVENTS).limit(1)).scalar()
            if oldest is not None:
                old = sa.delete(EVENT).where(EVENT.c.id <= oldest)
                db.execute(old.where(EVENT.c.pipeline.not_in(sa.select(PIPELINE.c.id))))

    # --- history -----------------------------------------------------------------------------------------------------

    def note(self, pipeline: str, *, who: str, what: str, **detail: Any) -> None:
        """Add a line of history."""
        with self._writing() as db:
            self._note(db, pipeline, who, what, detail)

    def events(self, pipeline: str | None, *, before: int | None = None, limit: int = 100) -> list[Event]:
        """Return the history before the id `before`, newest first.

        None: of all pipelines, deleted ones and the service.
        """
        query = sa.select(EVENT) if pipeline is None else sa.select(EVENT).where(EVENT.c.pipeline == pipeline)
        if before is not None:
            query = query.where(EVENT.c.id < before)
        with self._reading() as db:
            rows = db.execute(query.order_by(EVENT.c.id.desc()).limit(limit))
            return [Event(row.id, row.pipeline, row.at, row.who, row.what, json.loads(row.detail)) for row in rows]

    def _note(self, db: sa.Connection, pipeline: str, who: str, what: str, detail: Mapping[str, Any]) -> None:
        detail = {**detail, "request": REQUEST_ID.get()} if REQUEST_ID.get() else detail
        line = {"pipeline": pipeline, "at": self._clock(), "who": who, "what": what, "detail": _text(detail)}
        db.execute(sa.insert(EVENT).values(**line))
        newest = sa.select(EVENT.c.id).where(EVENT.c.pipeline == pipeline).order_by(EVENT.c.id.desc())
        oldest = db.execute(newest.offset(MAX_EVENTS).limit(1)).scalar()
        if oldest is not None:
            db.execute(sa.delete(EVENT).where(EVENT.c.pipeline == pipeline, EVENT.c.id <= oldest))

    # --- roles -------------------------------------------------------------------------------------------------------

    def roles(self, pipeline: str) -> dict[str, PipelineRole]:
        """Return the roles on a pipeline, by principal. Raises PipelineNotFound."""
        with self._reading() as db:
            _row(db, pipeline)
            rows = db.execute(sa.select(ROLE).where(ROLE.c.pipeline == pipeline).order_by(ROLE.c.principal))
            return {row.principal: PipelineRole(row.role) for row in rows}

    def grants_of(self, principal: str) -> tuple[Grant, ...]:
        """Return the roles of a principal as grants, one for each role."""
        with self._reading() as db:
            rows = db.execute(sa.select(ROLE).where(ROLE.c.principal == principal).order_by(ROLE.c.pipeline)).all()
        return tuple(Grant(PipelineRole(row.role).role, (f"{ResourceKind.PIPELINE}:{row.pipeline}",)) for row in rows)

    def set_role(
        self, pipeline: str, principal: str, role: PipelineRole | None, *, who: str
    ) -> dict[str, PipelineRole]:
        """Set or (None) remove a user's role. At least one owner stays. Raises PipelineNotFound, InvalidArgument."""
        with self._writing() as db:
            _row(db, pipeline)
            rows = db.execute(sa.select(ROLE).where(ROLE.c.pipeline == pipeline)).all()
            found = {row.principal: PipelineRole(row.role) for row in rows}
            if role is None:
                found.pop(principal, None)
            else:
                found[principal] = role
            if PipelineRole.OWNER not in found.values():
                raise InvalidArgument(f"{pipeline!r} would have no owner: make another user its owner first")
            if len(found) > MAX_ROLES:
                raise InvalidArgument(f"a pipeline has at most {MAX_ROLES} people with roles: give a token a pattern")
            db.execute(sa.delete(ROLE).where(ROLE.c.pipeline == pipeline, ROLE.c.principal == principal))
            if role is not None:
                db.execute(sa.insert(ROLE).values(pipeline=pipeline, principal=principal, role=role))
            self._note(db, pipeline, who, "role", {"principal": principal, "role": role and str(role)})
            return dict(sorted(found.items()))

    # --- secrets -----------------------------------------------------------------------------------------------------

    def secret_names(self, pipeline: str) -> list[str]:
        """Return the paths of a pipeline's secrets that are set."""
        with self._reading() as db:
            query = sa.select(SECRET.c.path).where(SECRET.c.pipeline == pipeline).order_by(SECRET.c.path)
            return list(db.execute(query).scalars())

    def secrets(self, pipeline: str) -> dict[str, str]:
        """Return its secrets in plain text, for its deployment only. Raises SecretUnreadable, InvalidSettings."""
        with self._reading() as db:
            rows = db.execute(sa.select(SECRET).where(SECRET.c.pipeline == pipeline)).all()
        return {row.path: self._keys.decrypt(row.value) for row in rows}

    def rotate_keys(self, *, who: str) -> int:
        """Encrypt all secrets again by the first key; return their number.

        Raises SecretUnreadable; nothing is changed then.
        """
        with self._writing() as db:
            rows = db.execute(sa.select(SECRET)).all()
            for row in rows:
                place = sa.and_(SECRET.c.pipeline == row.pipeline, SECRET.c.path == row.path)
                db.execute(sa.update(SECRET).where(place).values(value=self._keys.rotated(row.value)))
            self._note(db, KEYS, who, "rotate keys", {"secrets": len(rows)})
        return len(rows)

    # --- quotas ------------------------------------------------------------------------------------------------------

    def quotas(self) -> list[Quota]:
        """Return the quotas that were set, by account."""
        with self._reading() as db:
            return [Quota(*row) for row in db.execute(sa.select(QUOTA).order_by(QUOTA.c.account))]

    def used(self) -> dict[str, Quota]:
        """Return the present usage of each account's pipelines."""
        sums = (sa.func.count(), sa.func.sum(PIPELINE.c.cpus), sa.func.sum(PIPELINE.c.memory_mib))
        query = sa.select(PIPELINE.c.account, *sums).group_by(PIPELINE.c.account).order_by(PIPELINE.c.account)
        with self._reading() as db:
            return {row[0]: Quota(row[0], row[1], float(row[2]), int(row[3])) for row in db.execute(query)}

    def drop_quota(self, account: str, *, who: str) -> None:
        """Remove the account's own quota: the quota of ``*``, or the default, applies. No effect if it has none."""
        with self._writing() as db:
            db.execute(sa.delete(QUOTA).where(QUOTA.c.account == account))
            self._note(db, QUOTAS, who, "drop quota", {"account": account})

    def set_quota(self, quota: Quota, *, who: str) -> None:
        """Set a quota from now on; ``*`` applies to each account without one.

        Usage beyond it stays. Raises InvalidArgument.
        """
        with self._writing() as db:
            db.execute(sa.delete(QUOTA).where(QUOTA.c.account == quota.account))
            if db.execute(sa.select(sa.func.count()).select_from(QUOTA)).scalar_one() >= MAX_QUOTAS:
                raise InvalidArgument(f"there are {MAX_QUOTAS} quotas already")
            values = {name: getattr(quota, name) for name in ("account", "pipelines", "cpus", "memory_mib")}
            db.execute(sa.insert(QUOTA).values(**values))
            self._note(db, QUOTAS, who, "set quota", values)


def _ready(db: sa.Connection, pipeline: str) -> Any:
    row = _row(db, pipeline)
    if row.phase != Phase.READY:
        raise PipelineBusy(f"{pipeline!r} is {row.phase}")
    return row


def _unmoved(db: sa.Connection, was: Record) -> None:
    row = _row(db, was.id)
    if row.saga != _text(was.saga) or row.phase != was.phase or row.wanted != was.wanted:
        raise PipelineConflict(
            f"{was.id!r} was changed meanwhile: it is {row.phase}, and its wanted state is {row.wanted}"
        )


def _check_version(row: Any, version: int) -> None:
    if row.version != version:
        raise PipelineConflict(
            f"{row.id!r} has version {row.version}, not {version}, because it was changed: read"
            " it again, then repeat your change"
        )


def _check_quota(db: sa.Connection, account: str, cpus: float, memory: int, *, without: str = "") -> None:
    found = {
        row.account: Quota(*row) for row in db.execute(sa.select(QUOTA).where(QUOTA.c.account.in_([account, "*"])))
    }
    quota = found.get(account) or found.get("*") or DEFAULT_QUOTA
    sums = (sa.func.count(), sa.func.coalesce(sa.func.sum(PIPELINE.c.cpus), 0.0))
    query = sa.select(*sums, sa.func.coalesce(sa.func.sum(PIPELINE.c.memory_mib), 0))
    used = db.execute(query.where(PIPELINE.c.account == account, PIPELINE.c.id != without)).one()
    for what, have, more, most in (
        ("pipelines", used[0], 1, quota.pipelines),
        ("cpus", float(used[1]), cpus, quota.cpus),
        ("memory_mib", int(used[2]), memory, quota.memory_mib),
    ):
        if have + more > most + 1e-9:
            raise QuotaExceeded(
                f"the account {account!r} has {have:g} {what} of {most:g}, and this needs {more:g} more"
            )


def _columns(declaration: Mapping[str, Any]) -> dict[str, Any]:
    resources = declaration.get("resources", {})
    return {
        "account": declaration.get("account", ""),
        "name": declaration.get("name", ""),
        "cpus": float(resources.get("cpus", 1)),
        "memory_mib": int(resources.get("memory_mib", 1024)),
        "declaration": _text(declaration),
    }


def _put_secrets(db: sa.Connection, pipeline: str, encrypted: Mapping[str, bytes]) -> None:
    for path, value in encrypted.items():
        db.execute(sa.insert(SECRET).values(pipeline=pipeline, path=path, value=value))


def _row(db: sa.Connection, pipeline: str) -> Any:
    row = db.execute(sa.select(PIPELINE).where(PIPELINE.c.id == pipeline)).first()
    if row is None:
        raise PipelineNotFound(f"no pipeline {pipeline[:100]!r}")
    return row


def _record(row: Any) -> Record:
    values = dict(row._mapping)
    values |= {name: json.loads(values[name]) for name in ("declaration", "saga")}
    return Record(**values | {"phase": Phase(values["phase"])})


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
