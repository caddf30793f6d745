"""A builder of MATCH_RECOGNIZE queries: combines parts of a pattern with their conditions.

    drop = row("A").then(row("B", "price < PREV(price)").plus(), row("C", "price > PREV(price)").plus())
    query = drop.query(partition_by="symbol", order_by="at", measures={"low": "LAST(B.price)"})

Conditions and measures are SQL expressions as text. Names of variables are upper-cased, as in SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from millrace.base.errors import InvalidArgument
from millrace.streams.patterns import pattern as made
from millrace.streams.patterns.pattern import Pattern
from millrace.streams.patterns.query import MatchRecognize, Order, Rows, Skip
from millrace.streams.patterns.sql import parse_expression


@dataclass(frozen=True)
class Part:
    """A pattern, and the conditions of its variables as text."""

    pattern: Pattern
    conditions: Mapping[str, str] = field(default_factory=dict)

    def then(self, *others: Part) -> Part:
        """Match this part, then the others."""
        return self._with(made.sequence(self.pattern, *(each.pattern for each in others)), others)

    def or_(self, *others: Part) -> Part:
        """Match this part or one of the others, preferring earlier ones."""
        return self._with(made.Alternation((self.pattern, *(each.pattern for each in others))), others)

    def times(self, least: int, most: int | None = None, *, reluctant: bool = False) -> Part:
        """Match `least` to `most` times; without `most`, exactly `least` times. Raises InvalidArgument."""
        most = least if most is None else most
        if not 0 <= least <= most or not 0 < most <= made.MAX_REPEATS:
            raise InvalidArgument(
                f"times({least}, {most}): use numbers from 0 to {made.MAX_REPEATS}, with the least first"
            )
        return self._with(made.Repeated(self.pattern, least, most, not reluctant))

    def plus(self, *, reluctant: bool = False) -> Part:
        """Match once or more often."""
        return self._with(made.Repeated(self.pattern, 1, None, not reluctant))

    def star(self, *, reluctant: bool = False) -> Part:
        """Match any number of times."""
        return self._with(made.Repeated(self.pattern, 0, None, not reluctant))

    def optional(self, *, reluctant: bool = False) -> Part:
        """Match once or not at all."""
        return self._with(made.Repeated(self.pattern, 0, 1, not reluctant))

    def excluded(self) -> Part:
        """Match this part, but leave its rows out of ALL ROWS PER MATCH."""
        return self._with(made.Excluded(self.pattern))

    def without(self, other: Part) -> Part:
        """Match only if no later row within WITHIN is `other`, one row with a condition. Raises InvalidArgument."""
        if not isinstance(other.pattern, made.Variable):
            raise InvalidArgument("without() takes a part made by row(name, condition)")
        return self._with(made.sequence(self.pattern, made.Absent(other.pattern.name)), (other,))

    def query(
        self,
        *,
        order_by: str | Iterable[str],
        partition_by: str | Iterable[str] = (),
        measures: Mapping[str, str] | None = None,
        rows: Rows = "one",
        skip: Skip = "past last row",
        skip_to: str = "",
        within: timedelta | int | None = None,
        subsets: Mapping[str, Iterable[str]] | None = None,
    ) -> MatchRecognize:
        """Return the query. A column of `order_by` may end in ``" desc"``. Raises InvalidArgument."""
        names = made.variables(self.pattern)
        unions = {name.upper(): tuple(each.upper() for each in of) for name, of in (subsets or {}).items()}
        orders = [each.rpartition(" ") for each in ((order_by,) if isinstance(order_by, str) else order_by)]
        return MatchRecognize(
            pattern=self.pattern,
            order=tuple(
                Order(name, True) if name and word.lower() == "desc" else Order(f"{name}{space}{word}")
                for name, space, word in orders
            ),
            partition=(partition_by,) if isinstance(partition_by, str) else tuple(partition_by),
            define={name: parse_expression(text, names, unions) for name, text in self.conditions.items()},
            measures={name: parse_expression(text, names, unions) for name, text in (measures or {}).items()},
            subsets=unions,
            rows=rows,
            skip=skip,
            skip_to=skip_to.upper(),
            within=within,
        )

    def _with(self, pattern: Pattern, others: Iterable[Part] = ()) -> Part:
        conditions = dict(self.conditions)
        for each in others:
            for name, text in each.conditions.items():
                if conditions.setdefault(name, text) != text:
                    raise InvalidArgument(f"{name} has two conditions: {conditions[name]!r} and {text!r}")
        return Part(pattern, conditions)


def row(name: str, condition: str | None = None) -> Part:
    """Return a part of one row, matched as `name` if `condition` holds.

    Without a condition, that of another part of the same name applies, or any row matches.
    """
    return Part(made.Variable(name.upper()), {} if condition is None else {name.upper(): condition})


def permute(*parts: Part) -> Part:
    """Return a part that matches all `parts` in any order, preferring orders as SQL's PERMUTE does.

    Raises InvalidArgument for too many parts.
    """
    return Part(made.permute(*(each.pattern for each in parts)))._with(
        made.permute(*(each.pattern for each in parts)), parts
    )
