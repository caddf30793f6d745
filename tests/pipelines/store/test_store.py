"""The store of pipelines on SQLite and MariaDB: versions, roles, history, quotas, secrets, two who write at once."""

from __future__ import annotations

import threading

import pytest
from cryptography.fernet import Fernet

from millrace.access.grants import Principal, Resource, Role
from millrace.access.grants import ResourceKind as ResourceKind
from millrace.base.errors import (
    InvalidArgument,
    InvalidSettings,
    PipelineConflict,
    PipelineExists,
    PipelineNotFound,
    QuotaExceeded,
    SecretUnreadable,
)
from millrace.base.settings import Settings
from millrace.flows.declare.keys import FILE, VARIABLE, Keys, new_key
from millrace.pipelines.store import store as storing
from millrace.pipelines.store.records import Phase, PipelineRole, Quota
from millrace.pipelines.store.store import PipelineStore, open_pipelines
from tests.pipelines.store.conftest import Again, declared


def make(store: PipelineStore, pipeline: str = "flights", /, who: str = "ada", **more: object) -> None:
    record = store.create(declared(pipeline, **more), secrets={}, who=who, saga={"at": 0})
    store.move(record, phase=Phase.READY, saga=record.saga)


def test_what_was_created_is_there_for_the_next_process_too(store: PipelineStore, again: Again) -> None:
    made = store.create(
        declared("flights", account="ops", name="Flüge", resources={"cpus": 2, "memory_mib": 512}),
        secrets={"sink.password": "s3cret"},
        who="ada",
        saga={"at": 0},
    )
    assert (made.version, made.phase, made.wanted, made.cpus) == (1, Phase.CREATING, "STOPPED", 2.0)
    other = again()
    assert other.get("flights") == made
    assert other.all() == [made]
    assert other.secret_names("flights") == ["sink.password"]
    assert other.secrets("flights") == {"sink.password": "s3cret"}
    assert other.roles("flights") == {"ada": PipelineRole.OWNER}
    with pytest.raises(PipelineExists):
        make(other)
    for name in ("flight", "FLIGHTS"):
        with pytest.raises(PipelineNotFound):
            other.get(name)


def test_of_two_editors_of_one_version_the_second_is_told(store: PipelineStore, again: Again) -> None:
    make(store)
    secrets = {"sink.password": "x"}
    changed = store.update(
        "flights", declared("flights", name="A"), version=1, secrets=secrets, who="ada", detail={"changed": ["name"]}
    )
    assert (changed.version, changed.declaration["name"]) == (2, "A")
    with pytest.raises(PipelineConflict, match="version 2, not 1"):
        again().update("flights", declared("flights", name="B"), version=1, secrets={}, who="bob", detail={})
    assert store.get("flights").name == "A"
    assert store.secret_names("flights") == ["sink.password"], "what lost changed nothing"


def test_of_many_editors_at_once_one_wins_each_version(again: Again) -> None:
    stores = [again() for _ in range(4)]
    make(stores[0])
    won: list[int] = []
    failed: list[Exception] = []

    def edit(store: PipelineStore) -> None:
        for _ in range(5):
            try:
                version = store.get("flights").version
                store.update("flights", declared("flights"), version=version, secrets={}, who="x", detail={})
                won.append(version)
            except PipelineConflict:
                continue
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=edit, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert sorted(won) == list(range(1, len(won) + 1)), "each version was changed by one editor"
    assert stores[0].get("flights").version == len(won) + 1


def test_who_moves_what_another_has_moved_is_told(store: PipelineStore, again: Again) -> None:
    make(store)
    seen = store.get("flights")
    moved = store.move(seen, phase=Phase.READY, saga={"at": 1}, who="ada", what="made", topics=["a"])
    assert moved.phase is Phase.READY
    with pytest.raises(PipelineConflict):
        again().move(seen, phase=Phase.CREATING, saga={"at": 2})
    with pytest.raises(PipelineConflict):
        again().remove(seen, who="bob", what="deleted")
    store.remove(moved, who="ada", what="deleted")
    with pytest.raises(PipelineNotFound):
        store.remove(moved, who="ada", what="deleted")
    assert store.grants_of("ada") == ()
    assert [each.what for each in store.events("flights")] == ["deleted", "made", "create"]


def test_history_is_bounded_for_one_and_for_those_that_are_gone(
    store: PipelineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "MAX_EVENTS", 7)
    monkeypatch.setattr(storing, "MAX_DELETED_EVENTS", 10)
    make(store)
    for number in range(20):
        store.note("flights", who="ada", what="pause", number=number)
    found = store.events("flights")
    assert [each.detail.get("number") for each in found] == list(range(19, 12, -1))
    assert [each.detail["number"] for each in store.events("flights", before=found[2].id, limit=2)] == [16, 15]
    for number in range(6):
        make(store, f"p{number}")
        store.note(f"p{number}", who="ada", what="pause")
        store.remove(store.get(f"p{number}"), who="ada", what="deleted")
    assert sum(len(store.events(f"p{number}")) for number in range(6)) == 10
    assert len(store.events("flights")) == 7, "what is there loses nothing by what is gone"


def test_roles_are_grants_and_the_last_owner_stays(store: PipelineStore) -> None:
    make(store)
    make(store, "other", who="bob")
    store.set_role("flights", "bob", PipelineRole.OPERATOR, who="ada")
    bob = Principal("bob", store.grants_of("bob"))
    here, there = Resource(ResourceKind.PIPELINE, "flights"), Resource(ResourceKind.PIPELINE, "other")
    assert bob.has_role([Role.OPERATE], [here])
    assert not bob.has_role([Role.ADMIN], [here])
    assert bob.has_role([Role.ADMIN], [there])
    assert not bob.has_role([Role.READ], ()), "a role on a pipeline is none on the deployment"
    with pytest.raises(InvalidArgument, match="no owner"):
        store.set_role("flights", "ada", PipelineRole.VIEWER, who="ada")
    with pytest.raises(InvalidArgument, match="no owner"):
        store.set_role("flights", "ada", None, who="ada")
    store.set_role("flights", "bob", PipelineRole.OWNER, who="ada")
    assert store.set_role("flights", "ada", None, who="ada") == {"bob": PipelineRole.OWNER}
    assert store.grants_of("ada") == ()


def test_a_role_of_a_pipeline_that_is_gone_is_none_of_its_namesake(store: PipelineStore) -> None:
    make(store)
    store.set_role("flights", "eve", PipelineRole.OWNER, who="ada")
    store.remove(store.get("flights"), who="ada", what="deleted")
    make(store, who="bob")
    assert store.roles("flights") == {"bob": PipelineRole.OWNER}


def test_people_of_a_pipeline_are_bounded(store: PipelineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "MAX_ROLES", 2)
    make(store)
    store.set_role("flights", "bob", PipelineRole.VIEWER, who="ada")
    with pytest.raises(InvalidArgument, match="at most 2"):
        store.set_role("flights", "eve", PipelineRole.VIEWER, who="ada")


def test_an_account_gets_what_its_quota_says_and_no_more(store: PipelineStore) -> None:
    store.set_quota(Quota("*", 1, 100, 10_000), who="ada")
    store.set_quota(Quota("ops", 3, 3, 4096), who="ada")
    make(store, "a", account="ops", resources={"cpus": 2})
    make(store, "x", account="lab")
    with pytest.raises(QuotaExceeded, match="'lab' has 1 pipelines of 1"):
        make(store, "y", account="lab")
    with pytest.raises(QuotaExceeded, match="2 cpus of 3"):
        make(store, "b", account="ops", resources={"cpus": 1.5})
    with pytest.raises(QuotaExceeded, match="memory_mib"):
        make(store, "b", account="ops", resources={"cpus": 1, "memory_mib": 4000})
    make(store, "b", account="ops", resources={"cpus": 1})
    bigger = declared("b", account="ops", resources={"cpus": 1.1})
    with pytest.raises(QuotaExceeded):
        store.update("b", bigger, version=1, secrets={}, who="ada", detail={})
    smaller = declared("b", account="ops", resources={"cpus": 0.5})
    store.update("b", smaller, version=1, secrets={}, who="ada", detail={})
    assert [each.account for each in store.quotas()] == ["*", "ops"]


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_secrets_are_nowhere_in_plain_and_their_key_is_its_owners_alone(settings: Settings) -> None:
    with open_pipelines(settings, env={}) as store:
        make(store, "plain")
        assert not (settings.data_dir / FILE).exists(), "no key before there is a secret"
        store.create(declared("flights"), secrets={"sink.password": "hunter2-hunter2"}, who="ada", saga={})
        assert (settings.data_dir / FILE).stat().st_mode & 0o777 == 0o600
        for path in (settings.data_dir / "pipelines").iterdir():
            assert b"hunter2-hunter2" not in path.read_bytes(), path.name
        (settings.data_dir / FILE).chmod(0o644)
        with pytest.raises(InvalidSettings, match="mode to 600"):
            store.secrets("flights")
        (settings.data_dir / FILE).unlink()
        with pytest.raises(InvalidSettings, match=VARIABLE):
            store.secrets("flights")


def test_keys_are_rotated_and_one_that_is_gone_is_named(settings: Settings) -> None:
    old, new = new_key(), new_key()
    with open_pipelines(settings, env={VARIABLE: old}) as store:
        store.create(declared("flights"), secrets={"sink.password": "s"}, who="ada", saga={})
    with open_pipelines(settings, env={VARIABLE: f"{new},{old}"}) as store:
        assert store.secrets("flights") == {"sink.password": "s"}
        assert store.rotate_keys(who="ada") == 1
    with open_pipelines(settings, env={VARIABLE: new}) as store:
        assert store.secrets("flights") == {"sink.password": "s"}
    with open_pipelines(settings, env={VARIABLE: old}) as store:
        with pytest.raises(SecretUnreadable, match=VARIABLE):
            store.rotate_keys(who="ada")
        with pytest.raises(SecretUnreadable):
            store.secrets("flights")
    with open_pipelines(settings, env={VARIABLE: "nonsense"}) as store:
        with pytest.raises(InvalidSettings, match="new-key"):
            store.create(declared("more"), secrets={"a": "s"}, who="ada", saga={})
        with pytest.raises(PipelineNotFound):
            store.get("more")
    assert not (settings.data_dir / FILE).exists()
    Fernet(old)


def test_keys_that_would_be_lost_with_a_pod_are_refused(settings: Settings) -> None:
    """A pod without a volume makes a key, shares the secrets that it encrypts, and takes the key with it."""
    env = {"MILLRACE_PIPELINE_KEYS_REQUIRED": "1"}
    with pytest.raises(InvalidSettings, match=r"lost with this pod.*set MILLRACE_PIPELINE_KEYS to a key"):
        open_pipelines(settings, env=env)
    with pytest.raises(InvalidSettings, match="lost with this pod"):
        Keys(settings.data_dir, env=env).encrypt("secret")
    assert not (settings.data_dir / FILE).exists()
    open_pipelines(settings, env=env | {VARIABLE: new_key()}).close()


def keep(store: PipelineStore, pipeline: str, secrets: dict[str, str]) -> None:
    store.create(declared(pipeline), secrets=secrets, who="ada", saga={})


def test_no_new_key_is_made_beside_secrets_of_a_lost_one(settings: Settings) -> None:
    with open_pipelines(settings, env={}) as store:
        keep(store, "flights", {"sink.password": "first"})
        (settings.data_dir / FILE).unlink()
        with pytest.raises(InvalidSettings, match="the key that encrypted the secrets of 'flights' and others is gone"):
            keep(store, "orders", {"sink.password": "second"})
        keep(store, "plain", {})
        assert not (settings.data_dir / FILE).exists()
    with open_pipelines(settings, env={VARIABLE: new_key()}) as store:
        keep(store, "orders", {"sink.password": "second"})
        assert store.secrets("orders") == {"sink.password": "second"}
