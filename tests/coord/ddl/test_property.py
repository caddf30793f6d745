"""Any DDL, by coordinators that die at any step.

What was kept has its whole effect, what was not has none, chain and catalog alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.base.errors import MillraceError
from millrace.base.settings import Settings
from millrace.coord.coordinator import Coordinator
from millrace.message.schema import FieldSpec
from millrace.message.schema_changes import AddField
from tests.coord.ddl.rig import SCHEMA, ChainLog, Killed
from tests.failpoints import at_failpoints

KINDS = ("create", "drop", "add partition", "drop partition", "add field", "flush")


@dataclass(frozen=True)
class Step:
    kind: str
    collection: str
    name: str
    dies_at: int
    """The failpoint of the broadcaster at which the coordinator dies: 0 planned, 1 kept, 2 and later sent or
    acknowledged; -1: nowhere.
    """


STEPS = st.lists(
    st.builds(Step, st.sampled_from(KINDS), st.sampled_from("cd"), st.sampled_from("xy"), st.integers(-1, 6)),
    max_size=10,
)

Model = dict[str, tuple[set[str], list[str]]]
"""By collection its partitions, and the fields that were added."""


def after(model: Model, step: Step) -> Model | None:
    """What `step` makes of the model; None where it is refused."""
    there = model.get(step.collection)
    rest = {name: each for name, each in model.items() if name != step.collection}
    if step.kind == "create":
        return None if there else model | {step.collection: ({"_default"}, [])}
    if there is None:
        return None
    partitions, fields = there
    if step.kind == "drop":
        return rest
    if step.kind == "add partition":
        return None if step.name in partitions else rest | {step.collection: (partitions | {step.name}, fields)}
    if step.kind == "drop partition":
        return rest | {step.collection: (partitions - {step.name}, fields)} if step.name in partitions else None
    if step.kind == "add field":
        return None if step.name in fields else rest | {step.collection: (partitions, [*fields, step.name])}
    return model


def do(coordinator: Coordinator, step: Step) -> Any:
    match step.kind:
        case "create":
            return coordinator.create_collection(step.collection, SCHEMA, vchannels=2)
        case "drop":
            return coordinator.drop_collection(step.collection)
        case "add partition":
            return coordinator.create_partition(step.collection, step.name)
        case "drop partition":
            return coordinator.drop_partition(step.collection, step.name)
        case "add field":
            return coordinator.alter(step.collection, [AddField(FieldSpec(step.name, "string", True))])
        case _:
            return coordinator.flush(step.collection)


def found(coordinator: Coordinator) -> Model:
    return {
        each.name: (set(each.partitions), [spec.name for spec in each.schema.fields[2:]])
        for each in coordinator.collections()
    }


@settings(max_examples=20, deadline=None)
@given(STEPS)
def test_ddl_is_whole_or_not_there_wherever_its_coordinator_dies(steps: list[Step]) -> None:
    log, model = ChainLog(), Model()
    with tempfile.TemporaryDirectory() as folder:
        where = Settings(data_dir=Path(folder), cache_dir=Path(folder))

        @contextmanager
        def start(dies_at: int, passed: list[str]) -> Iterator[Coordinator]:
            def act(name: str) -> None:
                if name.startswith("ddl."):
                    passed.append(name)
                    if len(passed) == dies_at + 1:
                        raise Killed

            with Coordinator(where, log=log, append=log) as made, at_failpoints(act):  # type: ignore[arg-type]
                made._store._db.execute("pragma synchronous=off")  # no process dies here
                yield made

        with start(-1, []) as first:
            first.ensure_pchannels(2)
        for step in steps:
            wanted, passed = after(model, step), list[str]()
            with start(step.dies_at, passed) as mortal:
                try:
                    do(mortal, step)
                    assert wanted is not None, f"{step} was not refused"
                    model = wanted
                except Killed:
                    if passed != ["ddl.planned"]:
                        assert wanted is not None
                        model = wanted
                except MillraceError:
                    assert wanted is None, f"{step} was refused"
                    assert "ddl.kept" not in passed, "what is refused is not kept"
            with start(-1, []) as next_one:
                assert next_one.resume() == (0 < step.dies_at < len(passed))
                assert next_one.resume() == 0
                assert next_one.differences() == []
                assert found(next_one) == model
                held = {name for state in log.states.values() for name in state.vchannels}
                assert held == {name for each in next_one.collections() for name in each.vchannels}
