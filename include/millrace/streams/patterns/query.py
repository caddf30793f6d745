"""One MATCH_RECOGNIZE, checked: what the parser of SQL and the builder make, and the matchers run."""

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
    """What is looked for, and what is said of each match. Names of variables are as the pattern has them."""

    pattern: Pattern
    order: tuple[Order, ...]
    partition: tuple[str, ...] = ()
    define: Mapping[str, Expression] = field(default_factory=dict)
    measures: Mapping[str, Expression] = field(default_factory=dict)
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rows: Rows = "one"
    skip: Skip = "past last row"
    skip_to: str = ""
    """A variable, or a subset, for the skips to the first or last row of one."""
    within: timedelta | int | None = None
    """How far a match's last row is behind its first at most, by the first column of `order`."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        check(self.pattern)
        names = variables(self.pattern)
        if not names:
            raise InvalidArgument("PATTERN names no variable")
        for name, members in self.subsets.items():
            if name in names:
                raise InvalidArgument(f"SUBSET {name} has the name of a variable")
            if unknown := set(members) - set(names):
                raise InvalidArgument(f"SUBSET {name} names {_list(unknown)}, which PATTERN does not have")
        if unknown := set(self.define) - set(names):
            raise InvalidArgument(f"DEFINE names {_list(unknown)}, which PATTERN does not have")
        if not self.order:
            raise InvalidArgument("ORDER BY is missing: a pattern is one over rows in an order")
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
                    raise InvalidArgument(f"{name} asks for {_list(unknown)}, which PATTERN does not have")
                if name in self.define and leaf.final:
                    raise InvalidArgument(f"DEFINE {name}: FINAL has no meaning before the match is complete")
        for name in absent:
            if any(
                isinstance(each, Absent) is False and getattr(each, "name", None) == name for each in walk(self.pattern)
            ):
                raise InvalidArgument(
                    f"[^ {name}]: {name} is matched elsewhere in the pattern too: name the absent one otherwise"
                )
            if name not in self.define:
                raise InvalidArgument(f"[^ {name}]: DEFINE must say which rows are a {name}")

    def _check_rows(self, names: Sequence[str]) -> None:
        skips = self.skip in ("to first", "to last")
        if skips and self.skip_to not in names and self.skip_to not in self.subsets:
            raise InvalidArgument(f"AFTER MATCH SKIP TO {self.skip_to}: PATTERN has no such variable")
        excludes = any(isinstance(each, Excluded) for each in walk(self.pattern))
        if excludes and self.rows == "all with unmatched":
            raise InvalidArgument("ALL ROWS PER MATCH WITH UNMATCHED ROWS and {- -} exclude each other")
        if not self.measures and self.rows == "one" and not self.partition:
            raise InvalidArgument("ONE ROW PER MATCH without PARTITION BY and MEASURES gives rows without columns")
        if taken := set(self.measures) & set(self.partition):
            raise InvalidArgument(f"MEASURES {_list(taken)} has the name of a column of PARTITION BY")

    def _check_within(self) -> None:
        absent = any(isinstance(each, Absent) for each in walk(self.pattern))
        if self.within is None:
            if absent:
                raise InvalidArgument("[^ variable] needs WITHIN, which says until when no such row may come")
            return
        within = self.within // timedelta(microseconds=1) if isinstance(self.within, timedelta) else self.within
        if within < 0:
            raise InvalidArgument("WITHIN takes a time that is not negative")
        if self.order[0].descending:
            raise InvalidArgument("WITHIN needs the first column of ORDER BY to ascend")

    @property
    def variables(self) -> tuple[str, ...]:
        """All names of variables; a row's label is a place in here."""
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
        """How many rows before the first of a match are looked at, by PREV."""
        return max((-each.shift for each in self._reaches() if each.shift < 0), default=0)

    @property
    def lookahead(self) -> int:
        """How many rows behind the present one are looked at, by NEXT."""
        return max((each.shift for each in self._reaches() if each.shift > 0), default=0)

    @property
    def counts_matches(self) -> bool:
        """Whether anything asks for MATCH_NUMBER()."""
        said = [*self.define.values(), *self.measures.values()]
        return any(isinstance(leaf, MatchNumber) for each in said for leaf in leaves(each))

    def _reaches(self) -> list[Reach]:
        said = [*self.define.values(), *self.measures.values()]
        return [leaf for each in said for leaf in leaves(each) if isinstance(leaf, Reach)]

    def check_stream(self) -> list[str]:
        """Whether it may run over rows without an end; what lets its state grow, in words. Raises InvalidArgument."""
        if any(isinstance(each, Anchor) for each in walk(self.pattern)):
            raise InvalidArgument("^ and $ are the ends of a partition, and a stream's has none")
        if self.lookahead:
            raise InvalidArgument("NEXT looks at rows that have not come yet: a stream's pattern looks back, with PREV")
        if self.order[0].descending:
            raise InvalidArgument(
                "a stream's rows are taken in the order of time: the first column of ORDER BY ascends"
            )
        warnings = []
        if self.within is None and not bounded(self.pattern):
            warnings.append(
                "the pattern may match any number of rows and WITHIN bounds it not: an open match keeps its rows"
            )
        if self.counts_matches:
            warnings.append("MATCH_NUMBER() keeps a number for each key that ever matched")
        if self.lookback:
            warnings.append(f"PREV keeps the last {self.lookback} rows of each key")
        return warnings


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))


def size(pattern: Pattern) -> int:
    """Instructions that the pattern compiles to, about; repetitions with numbers are written out."""
    match pattern:
        case Repeated(body, least, most, _):
            return (size(body) + 2) * max(least, most or least + 1, 1)
        case _:
            inner = getattr(pattern, "parts", None) or getattr(pattern, "choices", None) or ()
            if isinstance(pattern, Excluded):
                inner = (pattern.body,)
            return 1 + sum(size(each) + 2 for each in inner)


__all__ = ["Aggregate", "Call", "MatchRecognize", "Order", "Rows", "Skip", "size"]
