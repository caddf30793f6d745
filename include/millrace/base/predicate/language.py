r"""Parse predicates over a collection's rows: a small language of comparisons, written as in SQL or Python.

    origin = 'JFK' AND (delay > 60 OR cancelled) AND tail IS NOT NULL AND carrier IN ('AA', 'UA')
    origin == "JFK" and 10 < delay <= 60 and tail is not None

- Columns are named directly, struct fields by path (``address.city``), any other name in backticks.
- Literals are numbers, TRUE, FALSE, and strings as in SQL (``'it''s'``: a backslash is a character) or as in Python
  (``"it's"``, ``"a\\tb"``).
- Comparisons are ``= == != <> < <= > >=``, also chained, ``BETWEEN``, ``IN`` with a list of literals, ``IS NULL`` or
  ``is None``, and ``LIKE`` (``%``, ``_``; escape them with a backslash, or the character of ``ESCAPE '!'``).
- ``AND``, ``OR``, ``NOT`` combine them; a boolean column is a condition by itself. Keywords are case-insensitive.
- Dates and timestamps are compared with ISO 8601 text (also ``DATE '...'``).

A comparison with null is unknown, and a row for which the whole predicate is unknown does not match. NaN is unequal to
everything, and neither less nor greater than anything.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, TypeAlias

from millrace.base.errors import InvalidArgument

MAX_LENGTH: Final = 10_000
MAX_DEPTH: Final = 100
SYNTAX_HELP: Final = (
    "a predicate has columns, literals, comparisons, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT,"
    " such as city = 'Oslo' AND age >= 18"
)


@dataclass(frozen=True, slots=True)
class ColumnRef:
    """A column, or a field inside it. As a condition, a column that is true."""

    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal value. A number with a point or an exponent is a Decimal."""

    value: bool | int | Decimal | str | bytes


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A computed value. Only schema expressions have these (:mod:`millrace.base.predicate.expressions`), not read
    predicates.
    """

    name: str
    args: tuple[Any, ...] = ()
    kind: str = ""
    """The target type of a cast, as text."""


@dataclass(frozen=True, slots=True)
class Compare:
    """`left` `op` `right`, with `op` one of ``= != < <= > >=``."""

    op: str
    left: ColumnRef | Literal
    right: ColumnRef | Literal


@dataclass(frozen=True, slots=True)
class In:
    """`subject` equals one of `values`."""

    subject: ColumnRef | Literal
    values: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Like:
    """`subject` matches `pattern`.

    ``%`` is any text and ``_`` any character. A backslash escapes ``%``, ``_`` or a backslash, and occurs nowhere else.
    """

    subject: ColumnRef
    pattern: str


@dataclass(frozen=True, slots=True)
class IsNull:
    """`subject` is null."""

    subject: ColumnRef | Literal


@dataclass(frozen=True, slots=True)
class Not:
    """`part` is false."""

    part: Condition


@dataclass(frozen=True, slots=True)
class And:
    """All of `parts` are true."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """At least one of `parts` is true."""

    parts: tuple[Condition, ...]


Condition: TypeAlias = ColumnRef | Literal | Compare | In | Like | IsNull | Not | And | Or


def parse_condition(text: str) -> Condition:
    """Parse `text` as a condition.

    Raises InvalidArgument with the problem and its position.
    """
    return Parser(text).parse()


def column_names(found: Condition) -> set[str]:
    """Return the columns that `found` uses."""
    return {each.path[0] for each in leaves(found) if isinstance(each, ColumnRef)}


def conjuncts(found: Condition) -> Iterator[Condition]:
    """Split `found` into conditions whose conjunction is equivalent to it."""
    if isinstance(found, And):
        for part in found.parts:
            yield from conjuncts(part)
    else:
        yield found


def rename_columns(found: Any, names: Mapping[str, str]) -> Any:
    """Return `found` with columns renamed by `names`."""
    match found:
        case ColumnRef((name, *inner)):
            return ColumnRef((names.get(name, name), *inner))
        case And(parts) | Or(parts):
            return type(found)(tuple(rename_columns(part, names) for part in parts))
        case Not(part):
            return Not(rename_columns(part, names))
        case In(subject, values):
            return In(rename_columns(subject, names), values)
        case Like(subject, pattern):
            return Like(rename_columns(subject, names), pattern)
        case IsNull(subject):
            return IsNull(rename_columns(subject, names))
        case Compare(op, left, right):
            return Compare(op, rename_columns(left, names), rename_columns(right, names))
    return found


def leaves(found: Any) -> Iterator[ColumnRef | Literal]:
    """Yield the columns and literals of `found`."""
    match found:
        case ColumnRef() | Literal():
            yield found
        case And(parts) | Or(parts):
            for part in parts:
                yield from leaves(part)
        case Not(part) | In(part, _) | Like(part, _) | IsNull(part):
            yield from leaves(part)
        case Compare(_, left, right):
            yield from (left, right)


_TOKEN: Final = re.compile(
    r"""(?P<space>\s+)
    |(?P<bytes>[bB](?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
    |(?P<text>'(?:[^']|'')*'|"(?:[^"\\]|\\.)*")
    |(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<name>[^\W\d]\w*|`(?:[^`]|``)+`)
    |(?P<mark>==|!=|<>|<=|>=|\|\||[=<>(){}\[\],.+*/%-])""",
    re.VERBOSE | re.DOTALL,
)
RESERVED: Final = frozenset({"and", "or", "not", "in", "is", "null", "none", "true", "false", "between", "like"})
_OPERATORS: Final = {"=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_ENDS: Final = {"(": ")", "[": "]", "{": "}"}
_ESCAPE: Final = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<hex>[0-9a-fA-F]{2})|u(?P<short>[0-9a-fA-F]{4})|U(?P<long>[0-9a-fA-F]{8})"
    r"|N\{(?P<name>[^}]+)\}|(?P<one>.))",
    re.DOTALL,
)
_ESCAPED: Final[dict[str, str]] = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
                                   "\n": "", "'": "'", '"': '"', "\\": "\\"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    place: int

    @property
    def word(self) -> str:
        return self.text.lower() if self.kind == "name" else self.text if self.kind == "mark" else ""


class Parser:
    """A recursive-descent parser of one text. A subclass may accept more values."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise InvalidArgument(f"a predicate has at most {MAX_LENGTH} characters")
        self._text = text
        self._at = 0
        self._depth = 0
        self._tokens = list(self._split())

    def parse(self) -> Condition:
        try:
            found = self._some()
        except RecursionError:  # signs, CASE and arguments do not count towards the depth
            raise self._wrong("it nests too deep") from None
        if self._now.kind != "end":
            raise self._wrong(f"{self._now.text!r} is unexpected")
        return found

    def _split(self) -> Iterator[_Token]:
        place = 0
        while place < len(self._text):
            found = _TOKEN.match(self._text, place)
            if found is None:
                if self._text[place] in "'\"":
                    raise self._wrong("the text is not terminated; write a quote inside '...' twice", place)
                raise self._wrong(f"{self._text[place]!r} is not part of a predicate", place)
            if found.lastgroup != "space":
                yield _Token(found.lastgroup or "", found[0], place)
            place = found.end()
        yield _Token("end", "", place)

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _wrong(self, words: str, place: int | None = None) -> InvalidArgument:
        where = (self._now.place if place is None else place) + 1
        return InvalidArgument(f"{self._text[:200]!r} is not a predicate: character {where}: {words}; {SYNTAX_HELP}")

    def _take(self, *words: str) -> bool:
        """Consume these keywords or symbols if they come next."""
        if [each.word for each in self._tokens[self._at : self._at + len(words)]] != list(words):
            return False
        self._at += len(words)
        return True

    def _some(self) -> Condition:
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _all(self) -> Condition:
        parts = [self._not()]
        while self._take("and"):
            parts.append(self._not())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _not(self) -> Condition:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong(f"it nests more than {MAX_DEPTH} deep")
        found = Not(self._not()) if self._take("not") else self._compared()
        self._depth -= 1
        return found

    def _compared(self) -> Condition:
        left = self._value()
        found: list[Condition] = []
        while (op := _OPERATORS.get(self._now.word)) is not None:
            self._at += 1
            right = self._value()
            found.append(Compare(op, self._operand(left), self._operand(right)))
            left = right
        if found:
            return found[0] if len(found) == 1 else And(tuple(found))
        if self._take("is"):
            denied = self._take("not")
            if not (self._take("null") or self._take("none")):
                raise self._wrong("IS must be followed by NULL")
            return _denied(IsNull(self._operand(left)), denied)
        denied = self._take("not")
        if self._take("in"):
            return _denied(In(self._operand(left), self._list()), denied)
        if self._take("between"):
            low = self._operand(self._value())
            if not self._take("and"):
                raise self._wrong("BETWEEN needs two values joined by AND")
            high = self._operand(self._value())
            subject = self._operand(left)
            return _denied(And((Compare(">=", subject, low), Compare("<=", subject, high))), denied)
        if self._take("like"):
            return _denied(self._like(left), denied)
        if denied:
            raise self._wrong("NOT must be followed by IN, BETWEEN or LIKE here")
        return left

    def _value(self) -> Any:
        """Parse an operand: here a column or a literal, or a condition in parentheses."""
        return self._primary()

    def _like(self, left: Condition) -> Condition:
        pattern, subject = self._pattern(), self._operand(left)
        if not isinstance(subject, ColumnRef):
            raise self._wrong("LIKE needs a column and a pattern in quotes")
        return Like(subject, pattern)

    def _pattern(self) -> str:
        """Parse a LIKE pattern and normalise its escape to a backslash."""
        token, pattern = self._now, self._primary()
        if not isinstance(pattern, Literal) or not isinstance(pattern.value, str):
            raise self._wrong("LIKE needs a pattern in quotes", token.place)
        escape = "\\"
        if self._take("escape"):
            given = self._primary()
            if not isinstance(given, Literal) or not isinstance(given.value, str) or len(given.value) > 1:
                raise self._wrong("ESCAPE needs one character in quotes, or none: ''")
            escape = given.value
        try:
            return "".join(
                f"\\{each}" if not wild and each in "%_\\" else each
                for each, wild in like_pieces(pattern.value, escape)
            )
        except ValueError as error:
            raise self._wrong(str(error), token.place) from None

    def _operand(self, found: Condition) -> ColumnRef | Literal:
        if not isinstance(found, ColumnRef | Literal):
            raise self._wrong("a comparison needs columns and literals as operands")
        return found

    def _list(self) -> tuple[Literal, ...]:
        end = _ENDS.get(self._now.word)
        if end is None:
            raise self._wrong("IN needs a list in parentheses")
        self._at += 1
        values: list[Literal] = []
        while not self._take(end):
            value = self._primary()
            if not isinstance(value, Literal):
                raise self._wrong("a list of IN has literals only")
            values.append(value)
            if not self._take(",") and self._now.word != end:
                raise self._wrong(f"expected a comma or {end}")
        return tuple(values)

    def _primary(self) -> Condition:
        token = self._now
        self._at += 1
        match token.kind, token.word:
            case "mark", "(":
                found = self._some()
                if not self._take(")"):
                    raise self._wrong("expected )")
                return found
            case "mark", "-" | "+":
                number = self._primary()
                if not isinstance(number, Literal) or isinstance(number.value, bool | str | bytes):
                    raise self._wrong("a sign must be followed by a number", token.place)
                if token.text == "+":
                    return number
                # A minus rounds a Decimal to the 28 digits of Python's context.
                value = number.value
                return Literal(value.copy_negate() if isinstance(value, Decimal) else -value)
            case "number", _:
                return Literal(int(token.text) if token.text.isdigit() else Decimal(token.text))
            case "text", _:
                return Literal(self._unquoted(token))
            case "bytes", _:
                return Literal(self._octets(token))
            case "name", "true" | "false" as word:
                return Literal(word == "true")
            case "name", "date" | "timestamp" if self._now.kind == "text":
                return self._primary()
            case "name", word if word in {"null", "none"}:
                raise self._wrong("nothing compares with NULL: write IS NULL or IS NOT NULL", token.place)
            case "name", word if word not in RESERVED:
                path = [_name(token.text)]
                while self._take("."):
                    if self._now.kind != "name":
                        raise self._wrong("expected a field's name")
                    path.append(_name(self._now.text))
                    self._at += 1
                return ColumnRef(tuple(path))
        self._at -= 1
        raise self._wrong("expected a column or a literal")

    def _unquoted(self, token: _Token) -> str:
        """Return a text without its quotes: by SQL's rule in single quotes, by Python's in double quotes."""
        if token.text[0] == "'":
            return token.text[1:-1].replace("''", "'")
        return _ESCAPE.sub(lambda found: self._escaped(found, token), token.text[1:-1])

    def _octets(self, token: _Token) -> bytes:
        text = _ESCAPE.sub(lambda found: self._escaped(found, token, octets=True), token.text[2:-1])
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise self._wrong("write bytes as one-byte characters or as \\xhh", token.place) from None

    def _escaped(self, found: re.Match[str], token: _Token, *, octets: bool = False) -> str:
        """Return the character of a Python escape sequence; an unknown one is unchanged."""
        kind, value = found.lastgroup, found[found.lastgroup or 0]
        try:
            if kind in ("octal", "hex"):
                return chr(int(value, 8 if kind == "octal" else 16) & (0xFF if octets else 0x1FF))
            if octets and kind != "one":
                return found[0]
            if kind in ("short", "long") and not 0xD800 <= int(value, 16) < 0xE000:
                return chr(int(value, 16))
            if kind == "name":
                return unicodedata.lookup(value)
        except (KeyError, ValueError, OverflowError):
            pass
        if kind != "one" or value == "x" or (value in "uUN" and not octets):
            raise self._wrong(f"{found[0]!r} is not a valid escape; write a backslash twice", token.place)
        return _ESCAPED.get(value, found[0])


def like_pieces(pattern: str, escape: str = "\\") -> Iterator[tuple[str, bool]]:
    """Yield the characters of a LIKE pattern, each with whether it is a wildcard (an unescaped ``%`` or ``_``).

    Raises ValueError if the pattern ends in an escape.
    """
    characters = iter(pattern)
    for each in characters:
        if each != escape:
            yield each, each in "%_"
            continue
        plain = next(characters, None)
        if plain is None:
            raise ValueError(f"the pattern ends in its escape {escape}, which must precede a character")
        yield plain, False


def like_text(pattern: str) -> tuple[str, bool, bool] | None:
    """Split a LIKE pattern that has ``%`` only at its start or end.

    Returns (text, starts with %, ends with %); None for any other pattern.
    """
    pieces = list(like_pieces(pattern))
    wild = [place for place, (_, wild) in enumerate(pieces) if wild]
    begins = next((place for place, (each, wild) in enumerate(pieces) if not (wild and each == "%")), len(pieces))
    ends = len(pieces)
    while ends > begins and pieces[ends - 1] == ("%", True):
        ends -= 1
    if any(begins <= place < ends for place in wild):
        return None
    text = "".join(each for each, _ in pieces[begins:ends])
    return text, begins > 0, ends < len(pieces) or begins == len(pieces) > 0


def like_regex(pattern: str) -> str:
    """Translate a LIKE pattern into a regular expression of RE2, Python or Java.

    The expression must match a whole text, with dots matching any character.
    """
    found: list[str] = []
    for each, wild in like_pieces(pattern):
        part = (".*" if each == "%" else ".") if wild else re.escape(each) if each != "\0" else r"\x00"
        if part != ".*" or found[-1:] != [part]:
            found.append(part)
    return "".join(found)


def _denied(found: Condition, denied: bool) -> Condition:
    return Not(found) if denied else found


def _name(text: str) -> str:
    return text[1:-1].replace("``", "`") if text.startswith("`") else text
