"""A pattern as a small program that threads run, after Trino's matcher: six instructions, each with its successor.

Preference is the order of a thread's descendants: of a Split, `first` before `second`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from millrace.base.errors import InvalidArgument
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
)

MAX_INSTRUCTIONS: Final = 50_000


@dataclass(frozen=True, slots=True)
class Label:
    """Take one row as the variable `code`."""

    code: int
    excluded: bool


@dataclass(frozen=True, slots=True)
class Split:
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class Jump:
    to: int


@dataclass(frozen=True, slots=True)
class Edge:
    """Continue only at the partition's start, or end."""

    at: str


@dataclass(frozen=True, slots=True)
class Without:
    """Continue only if no row that would match `code` follows within WITHIN."""

    code: int


@dataclass(frozen=True, slots=True)
class Done:
    """A match."""


Instruction: TypeAlias = Label | Split | Jump | Edge | Without | Done


def compiled(pattern: Pattern, names: tuple[str, ...]) -> tuple[Instruction, ...]:
    """Compile `pattern`; a variable's code is its index in `names`. Raises InvalidArgument if that is too long."""
    writer = _Writer(names)
    writer.write(pattern, False)
    writer.emit(Done())
    return tuple(writer.program)


class _Writer:
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.program: list[Instruction] = []

    def emit(self, instruction: Instruction) -> int:
        if len(self.program) >= MAX_INSTRUCTIONS:
            raise InvalidArgument(f"the pattern has more than {MAX_INSTRUCTIONS} instructions: use fewer repetitions")
        self.program.append(instruction)
        return len(self.program) - 1

    def write(self, part: Pattern, excluded: bool) -> None:
        match part:
            case Variable(name):
                self.emit(Label(self._names.index(name), excluded))
            case Sequence(parts):
                for each in parts:
                    self.write(each, excluded)
            case Alternation():
                self._choose(part, excluded)
            case Repeated():
                self._repeat(part, excluded)
            case Excluded(body):
                self.write(body, True)
            case Anchor(side):
                self.emit(Edge(side))
            case Absent(name):
                self.emit(Without(self._names.index(name)))
            case Nothing():
                pass

    def _choose(self, part: Alternation, excluded: bool) -> None:
        ends = []
        for each in part.choices[:-1]:
            at = self.emit(Jump(0))
            self.write(each, excluded)
            ends.append(self.emit(Jump(0)))
            self.program[at] = Split(at + 1, len(self.program))
        self.write(part.choices[-1], excluded)
        for at in ends:
            self.program[at] = Jump(len(self.program))

    def _repeat(self, part: Repeated, excluded: bool) -> None:
        for _ in range(part.least):
            self.write(part.body, excluded)
        entries = []
        for _ in range(1 if part.most is None else part.most - part.least):
            entries.append(self.emit(Jump(0)))
            self.write(part.body, excluded)
        if part.most is None:
            self.emit(Jump(entries[0]))
        leave = len(self.program)
        for at in entries:
            self.program[at] = Split(at + 1, leave) if part.greedy else Split(leave, at + 1)
