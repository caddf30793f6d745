"""A change of the catalog whose answer was lost is made again under its name: it is made once, and has the first one's result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millrace.access.grants import MACHINE
from millrace.base.errors import AppendRejected, CollectionExists, InvalidArgument, LogUnavailable
from millrace.base.settings import Settings
from millrace.catalog.calls import CALLS, ServedCatalog, call
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import Add
from tests.coord.ddl_rig import SCHEMA, ChainLog


@dataclass
class LosesAnswers:
    """A connection of which the first answer to each call that changes something is lost, behind its effect."""

    coordinator: Coordinator
    lost: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)

    def catalog(self, name: str, arguments: Mapping[str, Any], *, repeat: bool) -> dict[str, Any]:
        answer = call(self.coordinator, name, arguments, MACHINE)
        if CALLS[name].reads or name in self.lost:
            return answer
        self.lost.add(name)
        self.names.append(arguments["request"])
        if not repeat:
            raise LogUnavailable(f"whether {name} took effect is unknown")
        return self.catalog(name, arguments, repeat=repeat)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    log = ChainLog()
    with Coordinator(Settings(data_dir=tmp_path), log=log, append=log) as made:  # type: ignore[arg-type]
        made.ensure_pchannels(2)
        yield made


def broadcasts(coordinator: Coordinator) -> list[str]:
    return [each.task.kind for each in reversed(coordinator._store.broadcasts.shown(limit=100))]


def test_each_change_is_made_once_though_its_first_answer_is_lost(coordinator: Coordinator) -> None:
    connection = LosesAnswers(coordinator)
    served = ServedCatalog(connection)
    made = served.create_collection("rows", SCHEMA, vchannels=2, partitions=["eu", "us"])
    assert made == coordinator.collection("rows")
    number = served.create_partition("rows", "asia")
    assert coordinator.collection("rows").partitions["asia"] == number
    assert served.alter("rows", [Add(FieldSpec("more", "string", True))]) == 2
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
    served = ServedCatalog(LosesAnswers(coordinator, lost=set(CALLS)))
    served.create_collection("rows", SCHEMA, request="first")
    for again in ("", "second"):
        with pytest.raises(CollectionExists):
            served.create_collection("rows", SCHEMA, request=again)
    served.create_partition("rows", "p", request="third")
    with pytest.raises(AppendRejected, match="has a partition"):
        served.create_partition("rows", "p")


def test_a_name_of_another_change_is_refused_and_tells_nothing_of_it(coordinator: Coordinator) -> None:
    served = ServedCatalog(LosesAnswers(coordinator, lost=set(CALLS)))
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


def test_what_died_half_way_is_completed_by_who_makes_it_again(tmp_path: Path) -> None:
    log = ChainLog()
    with ExitStack() as opened:

        class Dead(Exception): ...

        def dies(seam: str) -> None:
            if seam == "ddl.kept":
                raise Dead

        made = Coordinator(Settings(data_dir=tmp_path), log=log, append=log)  # type: ignore[arg-type]
        opened.callback(made.close)
        made.ensure_pchannels(1)
        dying = Coordinator(Settings(data_dir=tmp_path), log=log, append=log, seam=dies)  # type: ignore[arg-type]
        opened.callback(dying.close)
        with pytest.raises(Dead):
            dying.create_collection("rows", SCHEMA, request="once")
        again = made.create_collection("rows", SCHEMA, request="once")
        assert again.state == "active"
        assert broadcasts(made) == ["create_collection"]
