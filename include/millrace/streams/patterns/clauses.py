"""Splits the text of MATCH_RECOGNIZE into clauses at sqlglot's tokens, respecting quotes, comments and parentheses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlglot.dialects.trino import Trino
from sqlglot.errors import SqlglotError

from millrace.base.errors import InvalidArgument

MAX_LENGTH: Final = 100_000

HEADS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "partition": (("PARTITION BY",), ("PARTITION", "BY")),
    "order": (("ORDER BY",), ("ORDER", "BY")),
    "measures": (("MEASURES",),),
    "rows": (("ONE", "ROW", "PER", "MATCH"), ("ALL", "ROWS", "PER", "MATCH")),
    "skip": (("AFTER", "MATCH", "SKIP"),),
    "pattern": (("PATTERN", "("),),
    "within": (("WITHIN",),),
    "subset": (("SUBSET",),),
    "define": (("DEFINE",),),
}
"""The words that begin each clause, in the order of the clauses."""


class Clause:
    """A range of the text's tokens."""

    def __init__(self, sql: str, tokens: list[Any], head: tuple[str, ...] = ()) -> None:
        self._sql, self._tokens, self.head = sql, tokens, head

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def text(self) -> str:
        return self._sql[self._tokens[0].start : self._tokens[-1].end + 1] if self._tokens else ""

    @property
    def words(self) -> list[str]:
        return [each.text.upper() for each in self._tokens]

    def name(self, place: int) -> str:
        """Return a name: verbatim if quoted, otherwise in upper case."""
        token = self._tokens[place]
        quoted = self._sql[token.start] == '"'
        return str(token.text) if quoted else str(token.text).upper()

    def raw(self, place: int) -> str:
        return str(self._tokens[place].text)

    def part(self, begin: int, end: int | None = None) -> Clause:
        return Clause(self._sql, self._tokens[begin:end])

    def split(self) -> list[Clause]:
        """Split at the commas outside parentheses."""
        found: list[list[Any]] = [[]]
        depth = 0
        for token in self._tokens:
            sign = self._sql[token.start]
            depth += (sign in "([") - (sign in ")]")
            if sign == "," and not depth:
                found.append([])
            else:
                found[-1].append(token)
        if any(not each for each in found):
            raise InvalidArgument(f"MATCH_RECOGNIZE: something is missing around a comma of {self.text[:200]!r}")
        return [Clause(self._sql, each) for each in found]

    def called(self) -> str:
        """Return the text with ``FINAL f(...)`` and ``RUNNING f(...)`` as calls, ``final_(f(...))``, for a parser."""
        opened: list[tuple[int, int]] = []
        inserts: dict[int, str] = {}
        cuts: list[tuple[int, int]] = []
        depth = 0
        tokens = self._tokens
        for place, token in enumerate(tokens):
            sign = self._sql[token.start]
            if sign == "(":
                depth += 1
            elif sign == ")":
                depth -= 1
                while opened and opened[-1][1] == depth:
                    opened.pop()
                    inserts[token.end] = inserts.get(token.end, "") + ")"
            elif sign in "fFrR" and token.text.upper() in ("FINAL", "RUNNING") and self._calls(place + 1):
                opened.append((place, depth))
                cuts.append((token.start, token.end))
        base = tokens[0].start
        text = []
        starts = dict(cuts)
        position, end_of_text = base, tokens[-1].end + 1
        while position < end_of_text:
            if position in starts:
                text.append(f"{self._sql[position : starts[position] + 1]}_(")
                position = starts[position] + 1
                continue
            text.append(self._sql[position] + inserts.get(position, ""))
            position += 1
        return "".join(text)

    def _calls(self, place: int) -> bool:
        return place + 1 < len(self._tokens) and self._sql[self._tokens[place + 1].start] == "("


def tokens_of(sql: str) -> list[Any]:
    """Return sqlglot's tokens of the text. Raises InvalidArgument."""
    if len(sql) > MAX_LENGTH:
        raise InvalidArgument(f"MATCH_RECOGNIZE has at most {MAX_LENGTH} characters")
    try:
        return list(Trino().tokenize(sql))
    except SqlglotError as error:
        raise InvalidArgument(f"MATCH_RECOGNIZE cannot be parsed: {error}") from error


def clauses(sql: str) -> dict[str, Clause]:
    """Return the clauses of `sql`: the content of ``MATCH_RECOGNIZE (...)``, or all of it. Raises InvalidArgument."""
    tokens = tokens_of(sql)
    words = ["" if sql[each.start] in "'\"" else " ".join(each.text.upper().split()) for each in tokens]
    if words[:2] == ["MATCH_RECOGNIZE", "("] and words[-1:] == [")"]:
        tokens, words = tokens[2:-1], words[2:-1]
    heads: list[tuple[int, str, tuple[str, ...]]] = []
    depth = 0
    for place, word in enumerate(words):
        if not depth:
            for clause, starts in HEADS.items():
                head = next((each for each in starts if tuple(words[place : place + len(each)]) == each), None)
                if head is not None:
                    heads.append((place, clause, head))
        depth += (word in ("(", "[")) - (word in (")", "]"))
    if not heads or heads[0][0] != 0:
        raise InvalidArgument(f"MATCH_RECOGNIZE begins with PARTITION BY, ORDER BY or MEASURES, not with {sql[:60]!r}")
    order = list(HEADS)
    found: dict[str, Clause] = {}
    for number, (place, clause, head) in enumerate(heads):
        if clause in found:
            raise InvalidArgument(f"MATCH_RECOGNIZE has {' '.join(head)} twice")
        if number and order.index(clause) < order.index(heads[number - 1][1]):
            raise InvalidArgument(f"MATCH_RECOGNIZE: {' '.join(head)} follows {' '.join(heads[number - 1][2])}")
        end = heads[number + 1][0] if number + 1 < len(heads) else len(tokens)
        if end == place + len(head) and clause not in ("rows",):
            raise InvalidArgument(f"MATCH_RECOGNIZE: nothing follows {' '.join(head)}")
        found[clause] = Clause(sql, tokens[place + len(head) : end], head)
    return found
