"""The memory of a thread: only what the conditions need of its rows, so that threads with equal memories merge.

Each leaf of a condition has a tracker: a small immutable state, advanced by each row. States are compared and hashed:
two threads at the same instruction with equal states have the same future, and the later one is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from millrace.streams.patterns.expressions import (
    Aggregate,
    Classifier,
    Expression,
    Reach,
    classifies,
)
from millrace.streams.patterns.operations import added, aggregate_kind, summed
from millrace.streams.patterns.values import over_values

State = Any
RowValue = Callable[[int, str | None], Any]
"""The value of a row expression at a row, which was matched as that variable."""


class Reached:
    """Tracker of a navigation: the last, or first, `offset` + 1 rows of its variables, as (row, variable)."""

    empty: tuple[Any, ...] = ()

    def __init__(self, reach: Reach, codes: frozenset[int] | None, value: RowValue, names: Sequence[str]) -> None:
        self._reach, self._codes, self._value, self._names = reach, codes, value, names
        self._whole = bool(reach.shift) and classifies(reach.row)
        self._labels = classifies(reach.row)

    def move(self, state: State, row: int, code: int) -> State:
        if self._whole:  # the variable of any row may be needed
            return (*state, (row, code))
        if self._codes is not None and code not in self._codes:
            return state
        at = (row, code if self._labels else -1)
        if self._reach.first:
            return state if len(state) > self._reach.offset else (*state, at)
        return (*state, at)[-1 - self._reach.offset :]

    def value(self, state: State, begin: int, end: int) -> Any:
        """Return the value at the navigation's row, or None. `begin` and `end` are the partition's."""
        reach = self._reach
        found = state
        if self._whole and self._codes is not None:
            found = tuple(each for each in state if each[1] in self._codes)
        if len(found) <= reach.offset:
            return None
        row, code = found[reach.offset] if reach.first else found[-1 - reach.offset]
        if reach.shift:
            row += reach.shift
            if not begin <= row < end:
                return None
            if self._whole:
                code = next((label for place, label in state if place == row), -1)
        return self._value(row, self._names[code] if code >= 0 else None)


class Counted:
    """Tracker of an aggregate: a running value, or all values for array_agg."""

    def __init__(
        self, aggregate: Aggregate, codes: frozenset[int] | None, value: RowValue, names: Sequence[str]
    ) -> None:
        self._function, self._codes, self._names = aggregate.function, codes, names
        self._value: RowValue = value if aggregate.row is not None else lambda row, code: 1
        self.empty = () if self._function == "array_agg" else (0, None)

    def move(self, state: State, row: int, code: int) -> State:
        if self._codes is not None and code not in self._codes:
            return state
        value = self._value(row, self._names[code])
        if self._function == "array_agg":
            return (*state, value)
        if value is None:
            return state
        count, total = state
        match self._function:
            case "sum":
                total = value if total is None else added(total, value)
            case "avg":
                total = float(value) if total is None else total + float(value)
            case "min":
                total = value if total is None or value < total or total != total else total
            case "max":
                total = value if total is None or value > total or value != value else total
        return (count + 1, total)

    def value(self, state: State, begin: int, end: int) -> Any:
        if self._function == "array_agg":
            return list(state)
        count, total = state
        match self._function:
            case "count":
                return count
            case "sum":
                return summed(total)
            case "avg" if count:
                return total / count
        return total


Tracker = Reached | Counted


class Memory:
    """The trackers of all conditions of a pattern, each distinct leaf once, and the conditions as functions.

    Their context is ``(states, partition's begin, partition's end, match number)``.
    """

    def __init__(
        self,
        names: Sequence[str],
        row_value: Callable[[Expression], RowValue],
        kinds: Callable[[Expression], pa.DataType],
    ) -> None:
        """`kinds`: the type of a row expression's values."""
        self._names = names
        self._row_value = row_value
        self._kinds = kinds
        self.trackers: list[Tracker] = []
        self._known: dict[Any, int] = {}

    def condition(self, expression: Expression) -> Callable[[Any], Any]:
        return over_values(expression, self._leaf, self._kind)

    def _kind(self, leaf: Expression) -> pa.DataType:
        if isinstance(leaf, Reach):
            return self._kinds(leaf.row)
        if not isinstance(leaf, Aggregate) or leaf.row is None:
            return pa.int64()
        return aggregate_kind(leaf.function, self._kinds(leaf.row))

    @property
    def empty(self) -> tuple[State, ...]:
        return tuple(each.empty for each in self.trackers)

    def moved(self, states: tuple[State, ...], row: int, code: int) -> tuple[State, ...]:
        return tuple([each.move(state, row, code) for each, state in zip(self.trackers, states, strict=True)])

    def _leaf(self, leaf: Expression) -> Callable[[Any], Any]:
        if not isinstance(leaf, Reach | Aggregate):
            return lambda context: context[3]
        if leaf not in self._known:
            codes = frozenset(self._names.index(each) for each in leaf.variables) if leaf.variables else None
            value = self._row_value(leaf.row) if leaf.row is not None else lambda row, label: 1
            made: Tracker = (
                Reached(leaf, codes, value, self._names)
                if isinstance(leaf, Reach)
                else Counted(leaf, codes, value, self._names)
            )
            self._known[leaf] = len(self.trackers)
            self.trackers.append(made)
        place = self._known[leaf]
        tracker = self.trackers[place]
        return lambda context: tracker.value(context[0][place], context[1], context[2])


__all__ = ["Classifier", "Memory", "Tracker"]
