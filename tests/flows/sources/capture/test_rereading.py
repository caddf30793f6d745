"""Rows that are read beside the changes: whatever is between them, a table that is called right is right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace.flows.sources.capture import rereading
from millrace.flows.sources.capture.ddl import Effect
from millrace.flows.sources.capture.rereading import Look, Page, Rereading

T = "public.t"


class World:
    """A database with a table whose log has changes of rows, and nothing of statements that change all of them."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.shape: dict[str, int] | None = {"oid": 1, "files": 1}
        self.log: list[tuple[int, int | None] | None] = []
        """A key and its new value; None: a statement, or a message."""
        self.states: list[dict[int, int]] = [{}]
        """The rows at each place of the log."""
        self.columns = [0]
        """How many columns the table has at each place."""
        self.locked = False

    def write(self, key: int, value: int | None) -> None:
        if self.shape is None:
            return
        if value is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = value
        self._log((key, value))

    def rewrite(self) -> None:
        if self.shape is not None:
            self.rows = {key: value + 1_000 for key, value in self.rows.items()}
            self.shape = {**self.shape, "files": self.shape["files"] + 1}
            self._log(None)

    def widen(self) -> None:
        if self.shape is not None:
            self.shape = {**self.shape, "columns": self.shape.get("columns", 0) + 1}
            self._log(None)

    def drop(self) -> None:
        self.shape, self.rows = None, {}
        self._log(None)

    def create(self) -> None:
        if self.shape is None:
            self.shape = {"oid": len(self.log) + 2, "files": 1}
            self._log(None)

    def _log(self, change: tuple[int, int | None] | None) -> None:
        self.log.append(change)
        self.states.append(dict(self.rows))
        self.columns.append((self.shape or {}).get("columns", 0))

    # --- as a TableReader ---

    def look(self, tables: Sequence[str], /) -> Look:
        return Look(dict.fromkeys(tables, self.shape), len(self.log))

    def effect(self, before: Any, after: Any, /) -> Effect:
        if before is None or after is None or before["oid"] != after["oid"]:
            return Effect.REPLACE
        return Effect.READ if before["files"] != after["files"] else Effect.NOTHING

    def admit(self, table: str, /) -> None:
        assert self.shape is not None

    def page(self, table: str, shape: Any, after: list[str] | None, /) -> Page | None:
        if self.locked or shape != self.shape:
            return None
        found = sorted(key for key in self.rows if after is None or key > int(after[0]))[:2]
        last = [str(found[-1])] if len(found) == 2 else None
        return Page(
            [json.dumps([key, self.rows[key]]).encode() for key in found], dict(self.shape or {}), last, len(self.log)
        )

    def passed(self, offset: Any, place: int, /) -> bool:
        return int(offset) >= place

    def wake(self) -> None:
        self._log(None)


class Capture:
    """Follows the log, one change at a time."""

    def __init__(self, world: World) -> None:
        self.world, self.place, self.held = world, len(world.log), dict(world.rows)
        self.reading = Rereading(world, [T], None)
        self.marks = 0

    def step(self) -> None:
        if self.place == len(self.world.log):
            return
        change = self.world.log[self.place]
        self.place += 1
        if change is not None:
            key, value = change
            if value is None:
                self.held.pop(key, None)
            else:
                self.held[key] = value
        self.reading.settle(self.place)
        if not self.reading.pending:
            self.marks += 1
            assert self.held == self.world.states[self.place], "what is called right is what the database had"
        for _, description, lines in self.reading.pages(self.place):
            if description is None:
                self.held.clear()
            else:
                assert description.get("columns", 0) == self.world.columns[self.place], "as changes there have them"
            self.held |= dict(map(json.loads, lines))
        self.reading.wake()

    def restart(self, *, added: bool = False) -> None:
        self.reading = Rereading(
            self.world, [T], json.loads(json.dumps(self.reading.stored())), added=[T] if added else []
        )


KEYS = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("write"), KEYS, st.integers(0, 9) | st.none()),
    st.sampled_from([("rewrite",), ("widen",), ("drop",), ("create",), ("restart",), ("added",), ("lock",)]),
    st.just(("step",)),
)


@settings(max_examples=300)
@example([(1, 1)], [("drop",), ("create",), ("step",), ("rewrite",), ("step",)])
@example([(n, n) for n in range(8)], [("rewrite",), ("step",), ("step",), ("write", 1, 1), ("widen",), ("step",)])
@given(st.lists(st.tuples(KEYS, st.integers(0, 9)), max_size=8), st.lists(STEPS, max_size=40))
def test_what_is_called_right_is_what_the_database_had_and_it_comes_to_that(
    filled: list[tuple[int, int]], steps: list[tuple[Any, ...]]
) -> None:
    world = World()
    for key, value in filled:
        world.write(key, value)
    capture = Capture(world)
    with patch.object(rereading, "LOOK_SECONDS", -1.0), patch.object(rereading, "READ_SECONDS", 0.0):
        for name, *given_ in steps:
            if name == "write":
                world.write(*given_)
            elif name in ("rewrite", "widen", "drop", "create"):
                getattr(world, name)()
            elif name == "lock":
                world.locked = not world.locked
            elif name == "added":
                capture.held = {99: 0}  # of a time when it was captured before
                capture.restart(added=True)
            elif name == "restart":
                capture.restart()
            else:
                capture.step()
        world.locked = False
        world.wake()
        for _ in range(len(world.log) + 60):
            capture.step()
        assert not capture.reading.pending
        assert capture.held == world.rows
        assert capture.marks


def test_a_table_without_changes_of_its_shape_is_not_read() -> None:
    world = World()
    world.write(1, 1)
    capture = Capture(world)
    with patch.object(world, "page", side_effect=AssertionError("nobody asked")):
        for value in range(5):
            world.write(1, value)
            capture.step()
    assert capture.reading.stored()["tables"] == {}
