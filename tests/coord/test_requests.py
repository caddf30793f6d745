"""A change of the catalog whose answer was lost is made again under its name.

It is made once, and has the first one's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.access.grants import LOCAL_ADMIN
from millrace.base.errors import AppendRejected, CollectionExists, InvalidArgument, LogUnavailable, ProducerFenced
from millrace.base.settings import Settings
from millrace.catalog.calls import RemoteCatalog, dispatch
from millrace.coord.catalog import store as catalog_store
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from millrace.rpc.calls import CATALOG_PREFIX, SERVER_CALLS, Repeat, server_calls
from tests.coord.ddl.rig import SCHEMA, ChainLog
from tests.failpoints import at_failpoints

CATALOG_CALLS = [call.name.removeprefix(CATALOG_PREFIX) for call in server_calls(CATALOG_PREFIX)]


@dataclass
class LosesAnswers:
    """A connection of which the first answer to each call that changes something is lost, behind its effect."""

    coordinator: Coordinator
    lost: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    def catalog(self, name: str, arguments: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        answer = dispatch(self.coordinator, name, arguments, LOCAL_ADMIN)
        if SERVER_CALLS[CATALOG_PREFIX + name].repeat is Repeat.READS or name in self.lost:
            return answer
        self.lost.add(name)
        self.names.append(arguments.get("request", ""))
        if not repeat:
            raise LogUnavailable(f"whether {name} took effect is unknown")
        return self.catalog(name, arguments, repeat=repeat)


@pytest.fixture
def coordinator(coordinator: Coordinator) -> Coordinator:
    coordinator.ensure_pchannels(2)
    return coordinator


def broadcasts(coordinator: Coordinator) -> list[str]:
    return [each.task.kind for each in reversed(coordinator._store.broadcasts.list_recent(limit=100))]


def test_each_change_is_made_once_though_its_first_answer_is_lost(coordinator: Coordinator) -> None:
    connection = LosesAnswers(coordinator)
    served = RemoteCatalog(connection)
    made = served.create_collection("rows", SCHEMA, vchannels=2, partitions=["eu", "us"])
    assert made == coordinator.collection("rows")
    number = served.create_partition("rows", "asia")
    assert coordinator.collection("rows").partitions["asia"] == number
    assert served.alter("rows", [AddField(FieldSpec("more", "string", True))]) == 2
    assert set(served.flush("rows")) == set(made.vchannels)
    served.drop_partition("rows", "asia")
    served.drop_collection("rows")
    kinds = [
        "create_collection",
        "create_partition",
        "schema_change",
        "manual_flush",
        "drop_partition",
        "drop_collection",
    ]
    assert broadcasts(coordinator) == kinds, "each once"
    assert len(set(connection.names)) == len(kinds), "each has a name of its own"


def test_a_change_without_a_name_or_under_another_one_is_another_change(coordinator: Coordinator) -> None:
    served = RemoteCatalog(LosesAnswers(coordinator, lost=set(CATALOG_CALLS)))
    served.create_collection("rows", SCHEMA, request="first")
    for again in ("", "second"):
        with pytest.raises(CollectionExists):
            served.create_collection("rows", SCHEMA, request=again)
    served.create_partition("rows", "p", request="third")
    with pytest.raises(AppendRejected, match="has a partition"):
        served.create_partition("rows", "p")


def test_a_name_of_another_change_is_refused_and_tells_nothing_of_it(coordinator: Coordinator) -> None:
    served = RemoteCatalog(LosesAnswers(coordinator, lost=set(CATALOG_CALLS)))
    for name in ("rows", "others"):
        served.create_collection(name, SCHEMA, request=f"make-{name}")
    for other in (
        lambda: served.create_collection("others", SCHEMA, request="make-rows"),
        lambda: served.drop_collection("rows", request="make-rows"),
        lambda: served.flush("rows", request="make-others"),
    ):
        with pytest.raises(InvalidArgument, match="another change"):
            other()
    for wrong in ("#1", "a b", "x" * 65):
        with pytest.raises(InvalidArgument, match="letters"):
            served.flush("rows", request=wrong)
    assert broadcasts(coordinator) == ["create_collection"] * 2


def test_wrong_arguments_are_named_and_cut(coordinator: Coordinator) -> None:
    with pytest.raises(InvalidArgument, match="broadcast: invalid arguments") as caught:
        dispatch(coordinator, "broadcast", {"messages": ["x" * 100_000], "request": "r"}, LOCAL_ADMIN)
    assert len(str(caught.value)) < 2_000


def test_what_died_half_way_is_completed_by_who_makes_it_again(tmp_path: Path) -> None:
    log = ChainLog()
    with ExitStack() as opened:

        class Dead(Exception): ...

        def dies(name: str) -> None:
            if name == "ddl.kept":
                raise Dead

        made = Coordinator(Settings(data_dir=tmp_path), log=log, append=log)  # type: ignore[arg-type]
        opened.callback(made.close)
        made.ensure_pchannels(1)
        dying = Coordinator(Settings(data_dir=tmp_path), log=log, append=log)  # type: ignore[arg-type]
        opened.callback(dying.close)
        with pytest.raises(Dead), at_failpoints(dies):
            dying.create_collection("rows", SCHEMA, request="once")
        again = made.create_collection("rows", SCHEMA, request="once")
        assert again.state == "active"
        assert broadcasts(made) == ["create_collection"]


def test_terms_epochs_and_pchannels_are_made_once_though_their_first_answer_is_lost(coordinator: Coordinator) -> None:
    served = RemoteCatalog(LosesAnswers(coordinator))
    assert [(each.name, each.term) for each in served.ensure_pchannels(3)] == [("dml_0", 1), ("dml_1", 1), ("dml_2", 1)]
    assert served.open_term("dml_0", config={"max_producers": 7}) == coordinator.term("dml_0") == 2
    assert served.next_epoch(9) == 1
    assert coordinator.next_epoch(9) == 2, "the next one's is another"
    served = RemoteCatalog(LosesAnswers(coordinator))
    assert served.next_epoch(9, held=2) == 3, "its own epoch does not fence it"
    for fenced in (lambda: served.next_epoch(9, held=2), lambda: served.next_epoch(9, held=2, request="other")):
        with pytest.raises(ProducerFenced):
            fenced()


def test_an_answer_is_its_requests_own_and_kept_while_it_is_among_the_newest(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_store, "MAX_ANSWERS", 2)
    assert coordinator.open_term("dml_0", request="a") == 2
    assert coordinator.next_epoch(9, request="b") == 1
    for wrong in (
        lambda: coordinator.open_term("dml_1", request="a"),
        lambda: coordinator.next_epoch(9, request="a"),
        lambda: coordinator.next_epoch(8, request="b"),
    ):
        with pytest.raises(InvalidArgument, match="was used for"):
            wrong()
    assert coordinator.next_epoch(8, request="c") == 1
    assert coordinator.next_epoch(9, request="b") == 1
    assert coordinator.open_term("dml_0", request="a") == 3, "forgotten: it opens another one"


def test_a_term_of_which_the_opening_died_is_opened_by_who_asks_again(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended = coordinator._append.append_one

    def dies(pchannel: str, entry: bytes, *, principal: str) -> Any:
        appended(pchannel, entry, principal=principal)
        raise LogUnavailable("it died behind the append")

    monkeypatch.setattr(coordinator._append, "append_one", dies)
    with pytest.raises(LogUnavailable):
        coordinator.open_term("dml_0", request="a")
    monkeypatch.undo()
    assert coordinator.open_term("dml_0", request="a") == 3
    assert coordinator.open_term("dml_0", request="a") == 3
    assert [each.opened for each in coordinator.pchannels()] == [True, True]
