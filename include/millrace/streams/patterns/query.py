"""A checked MATCH_RECOGNIZE query: made by the SQL parser and the builder, run by the matchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns.expressions import (
    Aggregate,
    Call,
    Expression,
    MatchNumber,
    Reach,
    columns,
    leaves,
)
from millrace.streams.patterns.pattern import (
    Absent,
    Anchor,
    Excluded,
    Pattern,
    Repeated,
    bounded,
    check,
    variables,
    walk,
)

Rows: TypeAlias = Literal["one", "all", "all omit empty", "all with unmatched"]
Skip: TypeAlias = Literal["past last row", "to next row", "to first", "to last"]


@dataclass(frozen=True, slots=True)
class Order:
    """A column that the rows of a partition are sorted by; nulls come last."""

    column: str
    descending: bool = False


@dataclass(frozen=True, slots=True)
class MatchRecognize:
    """The pattern to find, and the answer for each match. Names of variables are those of the pattern."""

    pattern: Pattern
    order: tuple[Order, ...]
    partition: tuple[str, ...] = ()
    define: Mapping[str, Expression] = field(default_factory=dict)
    measures: Mapping[str, Expression] = field(default_factory=dict)
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: Rows = "one"
    skip: Skip = "past last row"
    skip_to: str = ""
    """The variable or subset of a skip to its first or last row."""
    within: timedelta | int | None = None
    """Maximum distance between a match's first and last rows, by the first column of `order`."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        check(self.pattern)
        names = variables(self.pattern)
        if not names:
            raise InvalidArgument("PATTERN names no variable")
        for name, members in self.subsets.items():
            if name in names:
                raise InvalidArgument(f"SUBSET {name}: PATTERN has a variable of that name")
            if unknown := set(members) - set(names):
                raise InvalidArgument(f"SUBSET {name} names {_list(unknown)}, which PATTERN does not have")
        if unknown := set(self.define) - set(names):
            raise InvalidArgument(f"DEFINE names {_list(unknown)}, which PATTERN does not have")
        if not self.order:
            raise InvalidArgument("ORDER BY is missing: a pattern needs the order of its rows")
        self._check_expressions(names)
        self._check_rows(names)
        self._check_within()

    def _check_expressions(self, names: Sequence[str]) -> None:
        absent = {each.name for each in walk(self.pattern) if isinstance(each, Absent)}
        for name, expression in [*self.define.items(), *self.measures.items()]:
            for leaf in leaves(expression):
                if isinstance(leaf, MatchNumber):
                    continue
                if unknown := set(leaf.variables) - set(names):
                    raise InvalidArgument(f"{name} uses {_list(unknown)}, which PATTERN does not have")
                if name in self.define and leaf.final:
                    raise InvalidArgument(f"DEFINE {name}: FINAL is for MEASURES only, where the match is complete")
        for name in absent:
            if any(
                isinstance(each, Absent) is False and getattr(each, "name", None) == name for each in walk(self.pattern)
            ):
                raise InvalidArgument(
                    f"[^ {name}]: the pattern also matches {name}: use another name for the absent variable"
                )
            if name not in self.define:
                raise InvalidArgument(f"[^ {name}]: DEFINE must say which rows are a {name}")

    def _check_rows(self, names: Sequence[str]) -> None:
        skips = self.skip in ("to first", "to last")
        if skips and self.skip_to not in names and self.skip_to not in self.subsets:
            raise InvalidArgument(f"AFTER MATCH SKIP TO {self.skip_to}: PATTERN has no such variable")
        excludes = any(isinstance(each, Excluded) for each in walk(self.pattern))
        if excludes and self.rows == "all with unmatched":
            raise InvalidArgument("ALL ROWS PER MATCH WITH UNMATCHED ROWS and {- -} cannot be combined")
        if not self.measures and self.rows == "one" and not self.partition:
            raise InvalidArgument("ONE ROW PER MATCH without PARTITION BY and MEASURES gives rows without columns")
        if taken := set(self.measures) & set(self.partition):
            raise InvalidArgument(f"MEASURES {_list(taken)}: PARTITION BY has a column of that name")

    def _check_within(self) -> None:
        absent = any(isinstance(each, Absent) for each in walk(self.pattern))
        if self.within is None:
            if absent:
                raise InvalidArgument("[^ variable] needs WITHIN, the time in which no such row may come")
            return
        within = self.within // timedelta(microseconds=1) if isinstance(self.within, timedelta) else self.within
        if within < 0:
            raise InvalidArgument("WITHIN is negative: use a time of 0 or more")
        if self.order[0].descending:
            raise InvalidArgument("WITHIN needs the first column of ORDER BY to ascend")

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of all variables. A row's label is an index into it."""
        return variables(self.pattern)

    @property
    def skip_variables(self) -> tuple[str, ...]:
        return self.subsets.get(self.skip_to, (self.skip_to,))

    @property
    def columns(self) -> set[str]:
        """Names of the columns of the input that are read."""
        said = [*self.define.values(), *self.measures.values()]
        return {
            *self.partition,
            *(each.column for each in self.order),
            *(name for each in said for name in columns(each)),
        }

    @property
    def lookback(self) -> int:
        """Number of rows before a match's first row that PREV reads."""
        return max((-each.shift for each in self._reaches() if each.shift < 0), default=0)

    @property
    def lookahead(self) -> int:
        """Number of rows after the current one that NEXT reads."""
        return max((each.shift for each in self._reaches() if each.shift > 0), default=0)

    @property
    def counts_matches(self) -> bool:
        """Whether an expression uses MATCH_NUMBER()."""
        said = [*self.define.values(), *self.measures.values()]
        return any(isinstance(leaf, MatchNumber) for each in said for leaf in leaves(each))

    def _reaches(self) -> list[Reach]:
        said = [*self.define.values(), *self.measures.values()]
        return [leaf for each in said for leaf in leaves(each) if isinstance(leaf, Reach)]

    def check_stream(self) -> list[str]:
        """Return warnings about what lets the state grow. Raises InvalidArgument if it cannot run over a stream."""
        if any(isinstance(each, Anchor) for each in walk(self.pattern)):
            raise InvalidArgument("^ and $ match the ends of a partition, which a stream does not have")
        if self.lookahead:
            raise InvalidArgument("NEXT reads rows that have not come yet: use PREV in a stream's pattern")
        if self.order[0].descending:
            raise InvalidArgument(
                "a stream's rows are taken in the order of time: the first column of ORDER BY must ascend"
            )
        warnings = []
        if self.within is None and not bounded(self.pattern):
            warnings.append(
                "the pattern may match any number of rows, and WITHIN does not bound it: an open match keeps its rows"
            )
        if self.counts_matches:
            warnings.append("MATCH_NUMBER() keeps a number for each key that ever matched")
        if self.lookback:
            warnings.append(f"PREV keeps the last {self.lookback} rows of each key")
        return warnings


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def size(pattern: Pattern) -> int:
    """Return the approximate number of instructions of the compiled pattern. Counted repetitions are expanded."""
    match pattern:
        case Repeated(body, least, most, _):
            return (size(body) + 2) * max(least, most or least + 1, 1)
        case _:
            inner = getattr(pattern, "parts", None) or getattr(pattern, "choices", None) or ()
            if isinstance(pattern, Excluded):
                inner = (pattern.body,)
            return 1 + sum(size(each) + 2 for each in inner)


__all__ = ["Aggregate", "Call", "MatchRecognize", "Order", "Rows", "Skip", "size"]
