"""What Spark's own joins and windows of streams do, micro-batch by micro-batch, as plain loops over plain rows.

The model of what docs/joins.md says of them.

A row has a key ``k`` (null equals nothing), a time ``t`` in minutes and a value ``v``. A micro-batch has two
watermarks: that of the one before says which rows are late, its own which rows of the state are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = dict[str, Any]
JoinKind = Literal["inner", "left", "right", "full", "semi"]
OUTER: tuple[tuple[JoinKind, ...], ...] = (("left", "full"), ("right", "full"))
"""By side the joins that give a row without a partner.

In others one without a key is left out before anything looks at it.
"""
NEVER = -(1 << 40)
"""A watermark that no row is behind."""


@dataclass
class Marks:
    """The watermark of a query.

    Of its sides the one that is furthest behind, each `delay` behind its newest time, from the next micro-batch on.
    """

    delays: Sequence[int]
    before: int = NEVER
    now: int = NEVER
    newest: dict[int, int] = field(default_factory=dict)

    def end(self, *sides: Iterable[Row]) -> None:
        """A micro-batch of these rows has ended."""
        for number, rows in enumerate(sides):
            times = [row["t"] for row in rows]
            self.newest[number] = max([self.newest.get(number, NEVER), *times])
        self.before = self.now
        self.now = max(self.now, min(self.newest[number] - delay for number, delay in enumerate(self.delays)))


@dataclass
class Side:
    """One side of a join."""

    ends: Callable[[Row], int]
    """The row's time as the watermark judges it: late where it is not behind that."""
    over: Callable[[Row, int], bool]
    """Whether no row can come any more, at this watermark, that this one is joined with."""
    state: list[tuple[Row, list[bool]]] = field(default_factory=list)

    def in_time(self, rows: Iterable[Row], mark: int) -> list[Row]:
        return [row for row in rows if self.ends(row) > mark]


def of_times(earliest: int, latest: int) -> tuple[Side, Side]:
    """An interval join: the right row is from `earliest` to `latest` minutes behind the left one."""
    return (
        Side(lambda row: row["t"], lambda row, mark: row["t"] + latest < mark),
        Side(lambda row: row["t"], lambda row, mark: row["t"] - earliest < mark),
    )


def of_windows(size: int) -> tuple[Side, Side]:
    """A join of rows of one window."""

    def end(row: Row) -> int:
        return int(row["t"] // size * size + size)

    return Side(end, lambda row, mark: end(row) <= mark), Side(end, lambda row, mark: end(row) <= mark)


def of_all() -> tuple[Side, Side]:
    """A join without a watermark: nothing is late, nothing is over."""
    return Side(lambda row: -NEVER, lambda row, mark: False), Side(lambda row: -NEVER, lambda row, mark: False)


@dataclass
class Join:
    """A join of two streams."""

    kind: JoinKind
    matches: Callable[[Row, Row], bool]
    sides: tuple[Side, Side]
    marks: Marks
    taken: tuple[list[Row], list[Row]] = field(default_factory=lambda: ([], []))
    late: int = 0

    def batch(self, left: list[Row], right: list[Row]) -> list[tuple[Row | None, Row | None]]:
        """What a micro-batch of these rows gives."""
        given_in_time: list[list[Row]] = []
        given = [
            [row for row in rows if row["k"] is not None or self.kind in OUTER[number]]
            for number, rows in enumerate((left, right))
        ]
        for number, rows in enumerate(given):
            in_time = self.sides[number].in_time(rows, self.marks.before)
            self.taken[number].extend(in_time)
            self.late += len(rows) - len(in_time)
            given_in_time.append(in_time)
        found = self._semi(*given_in_time) if self.kind == "semi" else self._pairs(*given_in_time)
        found += self._over(self.marks.now)
        self.marks.end(*given)
        return found

    def _pairs(self, *sides: list[Row]) -> list[tuple[Row | None, Row | None]]:
        found: list[tuple[Row | None, Row | None]] = []
        for number, rows in enumerate(sides):
            for row in rows:
                partners = [kept for kept in self.sides[1 - number].state if self._paired(number, row, kept[0])]
                for partner, matched in partners:
                    found.append((row, partner) if number == 0 else (partner, row))
                    matched[0] = True
                self.sides[number].state.append((row, [bool(partners)]))
        return found

    def _semi(self, left: list[Row], right: list[Row]) -> list[tuple[Row | None, Row | None]]:
        """Left rows once, which are forgotten with that.

        The right side is taken first, and a row of it that is over with this very micro-batch is not kept: a left one
        that comes together with it does not find it (as of Spark 4.2).
        """
        found: list[tuple[Row | None, Row | None]] = []
        waiting, kept = self.sides[0], self.sides[1]
        for row in right:
            found += [(one, None) for one, _ in waiting.state if self._paired(1, row, one)]
            waiting.state = [each for each in waiting.state if not self._paired(1, row, each[0])]
            if not kept.over(row, self.marks.now):
                kept.state.append((row, [False]))
        for row in left:
            if any(self._paired(0, row, each[0]) for each in kept.state):
                found.append((row, None))
            else:
                waiting.state.append((row, [False]))
        return found

    def finish(self) -> list[tuple[Row | None, Row | None]]:
        """What comes when no row comes any more."""
        return self._over(-NEVER)

    @property
    def state_rows(self) -> int:
        return sum(len(side.state) for side in self.sides)

    def _paired(self, number: int, row: Row, kept: Row) -> bool:
        left, right = (row, kept) if number == 0 else (kept, row)
        keyed = left["k"] is not None or self.kind == "full"  # of which Spark takes a null to be equal to a null
        return keyed and left["k"] == right["k"] and self.matches(left, right)

    def _over(self, mark: int) -> list[tuple[Row | None, Row | None]]:
        """Forgets what no row can be joined with any more.

        Of an outer join that gives the rows that have had no partner.
        """
        found: list[tuple[Row | None, Row | None]] = []
        for number, outer in enumerate(OUTER):
            side = self.sides[number]
            gone = [each for each in side.state if side.over(each[0], mark)]
            side.state = [each for each in side.state if not side.over(each[0], mark)]
            if self.kind in outer:
                found += [(row, None) if number == 0 else (None, row) for row, matched in gone if not matched[0]]
        return found


@dataclass
class Windows:
    """Counts and sums by key and window, tumbling and sliding.

    `append` gives each once, when the watermark has passed its end; `update` each time it changed.
    """

    size: int
    slide: int
    mode: Literal["append", "update"]
    marks: Marks
    state: dict[tuple[str | None, int], list[int]] = field(default_factory=dict)
    taken: list[tuple[Row, int]] = field(default_factory=list)

    def batch(self, rows: list[Row]) -> list[tuple[str | None, int, int, int, int]]:
        """What a micro-batch of these rows gives: key, start, end, count, sum."""
        changed = set()
        for row in rows:
            first = row["t"] // self.slide * self.slide
            for start in range(first - self.size + self.slide, first + 1, self.slide):
                if start <= row["t"] < start + self.size and start + self.size > self.marks.before:
                    kept = self.state.setdefault((row["k"], start), [0, 0])
                    kept[0] += 1
                    kept[1] += row["v"]
                    changed.add((row["k"], start))
                    self.taken.append((row, start))
        over = {each for each in self.state if each[1] + self.size <= self.marks.now}
        found = self._rows(over if self.mode == "append" else changed)
        for each in over:
            del self.state[each]
        self.marks.end(rows)
        return found

    def finish(self) -> list[tuple[str | None, int, int, int, int]]:
        return self._rows(set(self.state)) if self.mode == "append" else []

    def _rows(self, chosen: set[tuple[str | None, int]]) -> list[tuple[str | None, int, int, int, int]]:
        return [(k, start, start + self.size, *self.state[k, start]) for k, start in chosen]  # type: ignore[misc]


@dataclass
class Sessions:
    """Counts and sums of rows of a key that are at most `gap` apart, once, when the watermark has passed
    the last one's time and the gap.
    """

    gap: int
    marks: Marks
    state: list[tuple[str | None, int, int, int, int]] = field(default_factory=list)
    taken: list[Row] = field(default_factory=list)

    def batch(self, rows: list[Row]) -> list[tuple[str | None, int, int, int, int]]:
        """What a micro-batch of these rows gives: key, start, end, count, sum."""
        in_time = [row for row in rows if row["t"] + self.gap > self.marks.before]
        self.taken += in_time
        each = [*self.state, *((row["k"], row["t"], row["t"] + self.gap, 1, row["v"]) for row in in_time)]
        self.state = []
        for k, start, end, count, total in sorted(each, key=lambda one: (one[0] is None, one[0] or "", one[1])):
            if self.state and self.state[-1][0] == k and start <= self.state[-1][2]:
                _, first, last, counted, summed = self.state.pop()
                start, end, count, total = first, max(end, last), count + counted, total + summed
            self.state.append((k, start, end, count, total))
        over = [one for one in self.state if one[2] <= self.marks.now]
        self.state = [one for one in self.state if one[2] > self.marks.now]
        self.marks.end(rows)
        return over

    def finish(self) -> list[tuple[str | None, int, int, int, int]]:
        return self.state
