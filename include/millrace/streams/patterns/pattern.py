"""The parts and the grammar of a PATTERN clause, which SQL parsers leave as text.

    ^ A+ (B | C){2,3} {- D* -} PERMUTE(E, F)? $ [^ G]

Variables are names; unquoted ones are upper-cased, as in SQL. ``[^ G]`` is an extension: no row that would be a `G`
follows within WITHIN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Final, Literal, TypeAlias

from millrace.base.errors import InvalidArgument

MAX_LENGTH: Final = 10_000
MAX_DEPTH: Final = 50
MAX_PERMUTED: Final = 6
MAX_REPEATS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Variable:
    """One row for which the variable's condition holds."""

    name: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """``()``: matches no row, anywhere."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``: the start or the end of the partition."""

    at: Literal["start", "end"]


@dataclass(frozen=True, slots=True)
class Sequence:
    """The parts in this order."""

    parts: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of the choices; earlier ones are preferred."""

    choices: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """`body`, `least` to `most` times (None: no maximum); as often as possible if `greedy`, otherwise as seldom."""

    body: Pattern
    least: int
    most: int | None
    greedy: bool = True


@dataclass(frozen=True, slots=True)
class Excluded:
    """``{- ... -}``: its rows are matched, but left out of ALL ROWS PER MATCH."""

    body: Pattern


@dataclass(frozen=True, slots=True)
class Absent:
    """``[^ B]``, at a pattern's end: no later row that would be a `B` comes within WITHIN of the first row."""

    name: str


Pattern: TypeAlias = Variable | Nothing | Anchor | Sequence | Alternation | Repeated | Excluded | Absent


def sequence(*parts: Pattern) -> Pattern:
    """Return the sequence of the parts, without needless nesting."""
    flat = [each for part in parts for each in (part.parts if isinstance(part, Sequence) else (part,))]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat)) if flat else Nothing()


def permute(*parts: Pattern) -> Pattern:
    """Match all parts in any order, preferring orders that sort first by the parts' places. Raises InvalidArgument."""
    if len(parts) > MAX_PERMUTED:
        raise InvalidArgument(f"PERMUTE takes at most {MAX_PERMUTED} parts, not {len(parts)}")
    return Alternation(tuple(sequence(*each) for each in permutations(parts))) if len(parts) > 1 else sequence(*parts)


def walk(pattern: Pattern) -> Iterator[Pattern]:
    """Yield the pattern and all its parts, in the order of the text."""
    yield pattern
    for part in _inside(pattern):
        yield from walk(part)


def variables(pattern: Pattern) -> tuple[str, ...]:
    """Return the names of all variables, including absent ones, each once, in the order of the text."""
    names = (each.name for each in walk(pattern) if isinstance(each, Variable | Absent))
    return tuple(dict.fromkeys(names))


def nullable(pattern: Pattern) -> bool:
    """Return whether the pattern may match without a row."""
    match pattern:
        case Variable():
            return False
        case Sequence(parts):
            return all(nullable(each) for each in parts)
        case Alternation(choices):
            return any(nullable(each) for each in choices)
        case Repeated(body, least, most, _):
            return least == 0 or most == 0 or nullable(body)
        case Excluded(body):
            return nullable(body)
        case _:
            return True


def bounded(pattern: Pattern) -> bool:
    """Return whether the number of rows of a match is bounded."""
    return not any(isinstance(each, Repeated) and each.most is None for each in walk(pattern))


def _inside(pattern: Pattern) -> tuple[Pattern, ...]:
    match pattern:
        case Sequence(parts):
            return parts
        case Alternation(choices):
            return choices
        case Repeated(body, _, _, _) | Excluded(body):
            return (body,)
        case _:
            return ()


def check(pattern: Pattern) -> None:
    """Raise InvalidArgument if an absence is anywhere but at the end."""
    inner = pattern.parts[:-1] if isinstance(pattern, Sequence) else ()
    last = pattern.parts[-1] if isinstance(pattern, Sequence) else pattern
    below = [*inner, *(() if isinstance(last, Absent) else (last,))]
    if any(isinstance(each, Absent) for part in below for each in walk(part)):
        raise InvalidArgument("[^ variable] is allowed only at the end of the whole pattern, outside parentheses")


_TOKEN: Final = re.compile(
    r"\s+|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<quoted>\"(?:[^\"]|\"\")+\")|(?P<number>\d+)"
    r"|(?P<sign>\{-|-\}|\[\^|[][(){}|*+?,^$])"
)


def parse(text: str) -> Pattern:
    """Return the pattern in `text`. Raises InvalidArgument with the position of the fault."""
    if len(text) > MAX_LENGTH:
        raise InvalidArgument(f"a pattern has at most {MAX_LENGTH} characters")
    found = _Parser(text).whole()
    check(found)
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        place = 0
        while place < len(text):
            token = _TOKEN.match(text, place)
            if token is None:
                raise self._wrong(f"{text[place]!r} is not part of a pattern", place)
            if token.lastgroup is not None:
                self._tokens.append((token.lastgroup, token[0], place))
            place = token.end()
        self._next = 0
        self._depth = 0

    def whole(self) -> Pattern:
        found = self._alternation()
        if self._next < len(self._tokens):
            raise self._wrong(f"{self._peek()!r} is unexpected")
        return found

    def _alternation(self) -> Pattern:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"nested more than {MAX_DEPTH} deep")
        choices = [self._sequence()]
        while self._taken("|"):
            choices.append(self._sequence())
        self._depth -= 1
        return choices[0] if len(choices) == 1 else Alternation(tuple(choices))

    def _sequence(self) -> Pattern:
        parts: list[Pattern] = []
        while self._peek() not in ("", "|", ")", "-}", ",", "]"):
            parts.append(self._quantified())
        if not parts:
            raise self._wrong("a pattern is missing (the empty one is written ())")
        return sequence(*parts)

    def _quantified(self) -> Pattern:
        body = self._primary()
        least, most = 1, 1  # type: int, int | None
        if self._taken("*"):
            least, most = 0, None
        elif self._taken("+"):
            least, most = 1, None
        elif self._taken("?"):
            least, most = 0, 1
        elif self._taken("{"):
            least, most = self._bounds()
        else:
            return body
        if isinstance(body, Anchor | Absent | Nothing):
            raise self._wrong("^, $, () and [^ ...] take no quantifier")
        return Repeated(body, least, most, greedy=not self._taken("?"))

    def _bounds(self) -> tuple[int, int | None]:
        least = self._number()
        if self._taken(","):
            most = self._number()
            if least is None and most is None:
                raise self._wrong("{,} has no number")
        else:
            most = least
            if least is None:
                raise self._wrong("a number is missing")
        self._expect("}")
        if most is not None and (most < (least or 0) or most == 0):
            raise self._wrong(f"{{{least or 0},{most}}} matches nothing")
        return least or 0, most

    def _number(self) -> int | None:
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "number":
            self._next += 1
            number = int(self._tokens[self._next - 1][1][:20])
            if number > MAX_REPEATS:
                raise self._wrong(f"at most {MAX_REPEATS} repetitions")
            return number
        return None

    def _primary(self) -> Pattern:
        if self._taken("("):
            if self._taken(")"):
                return Nothing()
            inside = self._alternation()
            self._expect(")")
            return inside
        if self._taken("{-"):
            inside = self._alternation()
            self._expect("-}")
            return Excluded(inside)
        if self._taken("[^"):
            absent = Absent(self._name())
            self._expect("]")
            return absent
        if self._taken("^"):
            return Anchor("start")
        if self._taken("$"):
            return Anchor("end")
        name = self._name()
        if name == "PERMUTE" and self._taken("("):
            parts = [self._alternation()]
            while self._taken(","):
                parts.append(self._alternation())
            self._expect(")")
            return permute(*parts)
        return Variable(name)

    def _name(self) -> str:
        kind, text, _ = self._tokens[self._next] if self._next < len(self._tokens) else ("", "", 0)
        if kind not in ("word", "quoted"):
            raise self._wrong("a variable is missing")
        self._next += 1
        return text.upper() if kind == "word" else text[1:-1].replace('""', '"')

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _taken(self, sign: str) -> bool:
        if self._peek() != sign:
            return False
        self._next += 1
        return True

    def _expect(self, sign: str) -> None:
        if not self._taken(sign):
            raise self._wrong(f"{sign!r} is missing")

    def _wrong(self, words: str, place: int | None = None) -> InvalidArgument:
        if place is None:
            place = self._tokens[self._next][2] if self._next < len(self._tokens) else len(self._text)
        return InvalidArgument(f"PATTERN ({self._text[:200]}): character {place + 1}: {words}")
