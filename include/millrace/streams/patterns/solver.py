"""Finds the matches from all places of a board at once, column by column, if no condition reads captured rows.

A node of the pattern is evaluated backwards: from the result of its continuation at each place (NO, YES, or OPEN: rows
to come decide) to its own. It stores the way that it prefers at each place; :meth:`Node.walk` follows these ways
forwards for the matches that were taken. The result is that of backtracking in order of preference, since with such
conditions the future of a way depends only on its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from millrace.streams.patterns.board import Board, Flags, Places, next_true, previous_true
from millrace.streams.patterns.pattern import (
    Absent,
    Alternation,
    Anchor,
    Excluded,
    Nothing,
    Pattern,
    Repeated,
    Sequence,
    Variable,
    nullable,
)

NO: Final = 0
YES: Final = 1
OPEN: Final = 2
MAX_ROUNDS: Final = 64
"""Maximum rounds of a repetition of several rows. Beyond, threads take over (millrace.streams.patterns.matcher)."""

Values = npt.NDArray[np.int8]


class TooDeep(Exception):
    """Raised if the pattern repeats groups of rows too often for columns, so that threads take over."""


@dataclass
class Traces:
    """Rows of matches: ranges of places matched as one variable, or as the one in `codes` for each place."""

    stretches: list[tuple[Places, Places, Places, Any, bool]] = field(default_factory=list)

    def add(self, matches: Places, starts: Places, ends: Places, codes: Any, excluded: bool) -> None:
        self.stretches.append((matches, starts, ends, codes, excluded))


class Node(Protocol):
    """A part of a pattern over one board."""

    def solve(self, after: Values) -> Values: ...
    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        """Return the places after this node of `matches`, which are at `places` before it."""
        ...


@dataclass
class _Row:
    """One variable, or alternatives of one row each; `codes` has the variable at each place."""

    board: Board
    mask: Flags
    codes: Any
    excluded: bool

    def solve(self, after: Values) -> Values:
        found = np.zeros(self.board.size, dtype=np.int8)
        found[:-1] = np.where(self.mask[:-1], after[1:], NO)
        found[self.board.last[self.board.open]] = OPEN
        return found

    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        if traces is not None:
            traces.add(matches, places, places + 1, self.codes, self.excluded)
        return places + 1


@dataclass
class _Rows:
    """A repetition of one row: a run of the mask, left at the place that is preferred."""

    row: _Row
    least: int
    most: int | None
    greedy: bool
    exits: Places | None = None

    def solve(self, after: Values) -> Values:
        board = self.row.board
        size = board.size
        here = np.arange(size)
        run = next_true(~self.row.mask)
        is_open = np.zeros(size, dtype=np.bool_)
        is_open[board.last[board.open]] = True
        nearest = here + self.least
        farthest = run if self.most is None else np.minimum(run, here + self.most)
        enough = nearest <= farthest
        starved = is_open[run] & ((farthest == run) if self.most is None else (run < here + self.most))
        possible = after != NO
        if self.greedy:
            exits = previous_true(possible)[farthest]
            leaves = enough & (exits >= nearest)
        else:
            exits = next_true(possible)[np.minimum(nearest, size - 1)]
            leaves = enough & (exits <= farthest)
        exits = np.where(leaves, exits, 0)
        found = np.where(leaves, after[exits], NO).astype(np.int8)
        found[starved if self.greedy else starved & ~leaves] = OPEN
        self.exits = exits
        return found

    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        assert self.exits is not None
        ends = self.exits[places]
        if traces is not None:
            traces.add(matches, places, ends, self.row.codes, self.row.excluded)
        return ends


@dataclass
class _Chain:
    parts: list[Node]

    def solve(self, after: Values) -> Values:
        for each in reversed(self.parts):
            after = each.solve(after)
        return after

    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        for each in self.parts:
            places = each.walk(matches, places, traces)
        return places


@dataclass
class _Choice:
    choices: list[Node]
    taken: npt.NDArray[np.int16] | None = None

    def solve(self, after: Values) -> Values:
        found = np.zeros(len(after), dtype=np.int8)
        self.taken = np.zeros(len(after), dtype=np.int16)
        for number, each in enumerate(self.choices):
            value = each.solve(after)
            better = (found == NO) & (value != NO)
            found[better] = value[better]
            self.taken[better] = number
        return found

    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        assert self.taken is not None
        ends = np.empty_like(places)
        taken = self.taken[places]
        for number, each in enumerate(self.choices):
            mine = np.flatnonzero(taken == number)
            if len(mine):
                ends[mine] = each.walk(matches[mine], places[mine], traces)
        return ends


@dataclass
class _Loop:
    """A repetition of several rows, any number of times: the fixed point of ``body, loop or leave``."""

    body: Node
    greedy: bool
    enters: Flags | None = None

    def solve(self, after: Values) -> Values:
        present = after
        for _ in range(MAX_ROUNDS):
            inside = self.body.solve(present)
            if self.greedy:
                following, enters = np.where(inside != NO, inside, after), inside != NO
            else:
                following, enters = np.where(after != NO, after, inside), after == NO
            if np.array_equal(following, present):
                self.enters = enters
                return present
            present = following
        raise TooDeep

    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        assert self.enters is not None
        places = places.copy()
        inside = np.flatnonzero(self.enters[places])
        while len(inside):
            places[inside] = self.body.walk(matches[inside], places[inside], traces)
            inside = inside[self.enters[places[inside]]]
        return places


@dataclass
class _Here:
    """Anchors, the empty pattern, and absence, which is checked afterwards."""

    allowed: Flags | None
    unsure: Flags | None = None

    def solve(self, after: Values) -> Values:
        found = after if self.allowed is None else np.where(self.allowed, after, NO).astype(np.int8)
        if self.unsure is not None:
            found[self.unsure & (after != NO)] = OPEN
        return found

    def walk(self, matches: Places, places: Places, traces: Traces | None) -> Places:
        return places


def build(
    pattern: Pattern, board: Board, masks: dict[str, Flags], names: tuple[str, ...], excluded: bool = False
) -> Node:
    """Return the node of `pattern` over `board`; `masks`, over places, have the rows of each variable.

    Raises TooDeep if the columns cannot decide: an unbounded repetition of what may match no row.
    """

    def build_part(inside: Pattern) -> Node:
        return build(inside, board, masks, names, excluded)

    match pattern:
        case Variable() | Excluded(Variable()):
            return _row(pattern, board, masks, names, excluded)
        case Sequence(parts):
            return _Chain([build_part(each) for each in parts])
        case Alternation(choices):
            single = _single(pattern)
            return (
                _row(pattern, board, masks, names, excluded)
                if single
                else _Choice([build_part(each) for each in choices])
            )
        case Excluded(body):
            return build(body, board, masks, names, True)
        case Repeated(body, least, most, greedy):
            if _single(body):
                return _Rows(_row(body, board, masks, names, excluded), least, most, greedy)
            if (most is None and nullable(body)) or max(least, most or 0) > MAX_ROUNDS:
                raise TooDeep
            copies: list[Node] = [build_part(body) for _ in range(least)]
            if most is None:
                copies.append(_Loop(build_part(body), greedy))
            else:
                optional: Node | None = None
                for _ in range(most - least):
                    entered: Node = build_part(body) if optional is None else _Chain([build_part(body), optional])
                    left = _Here(None)
                    optional = _Choice([entered, left] if greedy else [left, entered])
                copies += [] if optional is None else [optional]
            return _Chain(copies)
        case Anchor(at):
            allowed = np.zeros(board.size, dtype=np.bool_)
            allowed[board.first if at == "start" else board.last] = True
            unsure = None
            if at == "end":
                unsure = np.zeros(board.size, dtype=np.bool_)
                unsure[board.last[board.open]] = True
            return _Here(allowed, unsure)
        case Nothing() | Absent():
            return _Here(None)


def _single(pattern: Pattern) -> bool:
    """Return whether each way through the pattern takes exactly one row."""
    return isinstance(pattern, Variable) or (
        isinstance(pattern, Alternation) and all(isinstance(each, Variable) for each in pattern.choices)
    )


def _row(pattern: Pattern, board: Board, masks: dict[str, Flags], names: tuple[str, ...], excluded: bool) -> _Row:
    if isinstance(pattern, Excluded):
        return _row(pattern.body, board, masks, names, True)
    if isinstance(pattern, Variable):
        return _Row(board, masks[pattern.name], names.index(pattern.name), excluded)
    assert isinstance(pattern, Alternation)
    mask = np.zeros(board.size, dtype=np.bool_)
    codes = np.zeros(board.size, dtype=np.int16)
    for each in reversed(pattern.choices):
        assert isinstance(each, Variable)
        codes[masks[each.name]] = names.index(each.name)
        mask |= masks[each.name]
    return _Row(board, mask, codes, excluded)
