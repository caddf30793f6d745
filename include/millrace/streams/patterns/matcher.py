"""Threads over rows: for conditions on captured rows, and where columns cannot decide.

The threads of one start are ordered by preference. A row advances all of them. A thread that is Done ends those after
it. Of two threads at one instruction with equal memories the first stays (millrace.streams.patterns.captures), so the
remaining threads all differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.captures import Memory
from millrace.streams.patterns.program import Done, Edge, Instruction, Jump, Label, Split, Without

MAX_THREADS: Final = 100_000

Path = Any
"""The rows so far, last one first: (code, excluded, path before it), or None."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of a start: its partition's range, the last row that its match may reach, and whether more may come."""

    begin: int
    end: int
    limit: int
    open: bool


@dataclass(slots=True)
class Threads:
    """Finds the match that begins at a row: `possible` rows of each variable, and `conditions` that must also hold."""

    program: tuple[Instruction, ...]
    memory: Memory
    possible: Mapping[int, Any]
    conditions: Mapping[int, Callable[[Any], Any]]

    def find(self, start: int, span: Span, number: int) -> list[tuple[int, bool]] | bool | None:
        """Return the codes of the match's rows, and whether they are excluded; None if there is no match.

        False if later rows decide. Raises InvalidArgument.
        """
        program, memory, possible, conditions = self.program, self.memory, self.possible, self.conditions
        found: Path | bool | None = None
        matched = False
        threads: list[tuple[int, tuple[Any, ...], Path]] = [(0, memory.empty, None)]
        row = start
        while True:
            waiting: list[tuple[int, tuple[Any, ...], Path]] = []
            seen: set[Any] = set()
            for thread in threads:
                finished = self._settle(thread, row, span, number, waiting, seen)
                if finished is False:
                    # Not known yet whether this one is done: it stays the first candidate unless an earlier one runs.
                    return False
                if isinstance(finished, tuple):
                    found, matched = finished[0], True
                    break
            if not waiting:
                break
            if row >= span.limit:
                if span.open:
                    return False
                break
            threads = []
            for at, states, path in waiting:
                label = program[at]
                assert isinstance(label, Label)
                if not possible[label.code][row]:
                    continue
                states = memory.moved(states, row, label.code)
                condition = conditions.get(label.code)
                if condition is not None and condition((states, span.begin, span.end, number)) is not True:
                    continue
                threads.append((at + 1, states, (label.code, label.excluded, path)))
            row += 1
        return _unrolled(found) if matched else None

    def _settle(
        self,
        thread: tuple[int, tuple[Any, ...], Path],
        row: int,
        span: Span,
        number: int,
        waiting: list[tuple[int, tuple[Any, ...], Path]],
        seen: set[Any],
    ) -> tuple[Path] | bool | None:
        """Follow a thread to the rows it waits for; return its path, in a tuple, if it is done."""
        at_first, states, path = thread
        stack = [at_first]
        while stack:
            at = stack.pop()
            if (at, states) in seen:
                continue
            seen.add((at, states))
            match self.program[at]:
                case Label():
                    waiting.append((at, states, path))
                    if len(waiting) > MAX_THREADS:
                        raise InvalidArgument(
                            f"the pattern has more than {MAX_THREADS} threads at one row: bound it by WITHIN"
                        )
                case Split(first, second):
                    stack += [second, first]
                case Jump(to):
                    stack.append(to)
                case Edge(side):
                    if side == "start" and row == span.begin:
                        stack.append(at + 1)
                    elif side == "end" and row == span.end:
                        if span.open:
                            return False
                        stack.append(at + 1)
                case Without(code):
                    later = self._occurs(code, states, row, span, number)
                    if later is None:
                        return False
                    if not later:
                        stack.append(at + 1)
                case Done():
                    return (path,)
        return None

    def _occurs(self, code: int, states: tuple[Any, ...], row: int, span: Span, number: int) -> bool | None:
        """Return whether a row from `row` on would match `code`; None if none has, and more rows may come."""
        condition = self.conditions.get(code)
        for place in range(row, span.limit):
            if self.possible[code][place] and (
                condition is None
                or condition((self.memory.moved(states, place, code), span.begin, span.end, number)) is True
            ):
                return True
        return None if span.open else False


def _unrolled(path: Path) -> list[tuple[int, bool]]:
    found = []
    while path is not None:
        code, excluded, path = path
        found.append((code, excluded))
    found.reverse()
    return found
