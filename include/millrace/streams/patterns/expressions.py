"""The expressions of DEFINE and MEASURES: operations over values from the rows of a match.

A *row expression* reads one row: its columns and classifier. A *match expression* reads a match, at one of its rows:
its leaves are :class:`Reach` (a row expression at the row that a navigation leads to),
:class:`Aggregate` and :class:`MatchNumber`. A plain column ``A.x`` is ``RUNNING LAST(A.x)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from millrace.base.errors import InvalidArgument

AGGREGATES: Final = frozenset({"count", "sum", "avg", "min", "max", "array_agg"})


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, text, truth value, date, datetime, timedelta, or None."""

    value: Any


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the row."""

    name: str


@dataclass(frozen=True, slots=True)
class Classifier:
    """The variable that the row was matched as."""


@dataclass(frozen=True, slots=True)
class Call:
    """An operation of millrace.streams.patterns.operations."""

    name: str
    arguments: tuple[Expression, ...]
    kind: str = ""
    """Target type of a cast."""


@dataclass(frozen=True, slots=True)
class Reach:
    """`row` at the `offset`-th row from the first, or from the last, matched as one of `variables` (empty: any).

    From there it moves by `shift` physical rows, inside the partition. `final`: in the whole match, not only up to the
    present row.
    """

    row: Expression
    variables: tuple[str, ...] = ()
    first: bool = False
    offset: int = 0
    shift: int = 0
    final: bool = False


@dataclass(frozen=True, slots=True)
class Aggregate:
    """`function` of `row` (None: of the rows themselves) over the rows matched as one of `variables` (empty: any)."""

    function: str
    row: Expression | None
    variables: tuple[str, ...] = ()
    final: bool = False


@dataclass(frozen=True, slots=True)
class MatchNumber:
    """Number of the match within its partition, from 1."""


Leaf: TypeAlias = Reach | Aggregate | MatchNumber
Expression: TypeAlias = Constant | Column | Classifier | Call | Reach | Aggregate | MatchNumber


def leaves(expression: Expression) -> Iterator[Leaf]:
    """Yield the leaves of a match expression, in order."""
    if isinstance(expression, Call):
        for each in expression.arguments:
            yield from leaves(each)
    elif isinstance(expression, Reach | Aggregate | MatchNumber):
        yield expression


def columns(expression: Expression | None) -> Iterator[str]:
    """Yield the names of all columns that an expression reads."""
    match expression:
        case Column(name):
            yield name
        case Call(_, arguments, _):
            for each in arguments:
                yield from columns(each)
        case Reach() | Aggregate():
            yield from columns(expression.row)
        case _:
            return


def classifies(expression: Expression | None) -> bool:
    """Return whether a row expression uses the row's variable."""
    return isinstance(expression, Classifier) or (
        isinstance(expression, Call) and any(classifies(each) for each in expression.arguments)
    )


def conjuncts(expression: Expression) -> list[Expression]:
    """Return the operands of an AND, or else the expression itself."""
    if isinstance(expression, Call) and expression.name == "and":
        return [part for each in expression.arguments for part in conjuncts(each)]
    return [expression]


def is_local(expression: Expression, variable: str) -> bool:
    """Return whether a condition of `variable` depends on a row's place in the partition, not on earlier matches."""
    return all(
        isinstance(each, Reach)
        and not each.first
        and not each.offset
        and (not each.variables or variable in each.variables)
        and not (each.shift and classifies(each.row))
        for each in leaves(expression)
    )


def over_rows(expression: Expression, *, what: str) -> tuple[Expression, tuple[str, ...], list[Reach]]:
    """Turn a match expression into a row expression, for a navigation or an aggregate around it.

    Return it with the variables of all of its columns, and its navigations. Raises InvalidArgument if they differ.
    """
    found = list(leaves(expression))
    if any(not isinstance(each, Reach) for each in found):
        raise InvalidArgument(f"{what} cannot contain aggregates or MATCH_NUMBER()")
    reaches = [each for each in found if isinstance(each, Reach)]
    if len({(each.variables, each.first, each.offset, each.shift) for each in reaches}) > 1:
        raise InvalidArgument(f"all columns inside {what} must belong to the same variable")
    return _rows(expression), reaches[0].variables if reaches else (), reaches


def _rows(expression: Expression) -> Expression:
    match expression:
        case Reach():
            return expression.row
        case Call(name, arguments, kind):
            return Call(name, tuple(_rows(each) for each in arguments), kind)
        case _:
            return expression


def navigated(expression: Expression, *, first: bool, offset: int, final: bool | None) -> Expression:
    """Return ``FIRST(expression, offset)`` or ``LAST(...)``. Raises InvalidArgument."""
    name = "FIRST" if first else "LAST"
    if offset < 0:
        raise InvalidArgument(f"{name} takes an offset of 0 or more")
    row, names, reaches = over_rows(expression, what=name)
    if any(each.first or each.offset or each.shift for each in reaches):
        raise InvalidArgument(f"{name} cannot contain another navigation: write PREV(FIRST(A.x), 1) instead")
    return Reach(row, names, first=first, offset=offset, final=bool(final))


def shifted(expression: Expression, by: int, *, name: str) -> Expression:
    """Return ``PREV(expression, n)`` (`by` < 0) or ``NEXT(expression, n)``. Raises InvalidArgument."""
    row, names, reaches = over_rows(expression, what=name)
    if any(each.shift for each in reaches):
        raise InvalidArgument(f"{name} cannot contain PREV or NEXT: write one with the sum of the offsets")
    at = reaches[0] if reaches else Reach(row)
    return Reach(row, names, first=at.first, offset=at.offset, shift=by, final=at.final)


def aggregated(function: str, expression: Expression | None, variables: tuple[str, ...], *, final: bool) -> Expression:
    """Return ``function(expression)``. Without an expression, count rows. Raises InvalidArgument."""
    if function not in AGGREGATES:
        raise InvalidArgument(f"{function} is not an aggregate; use {', '.join(sorted(AGGREGATES))}")
    if expression is None:
        return Aggregate(function, None, variables, final)
    row, names, reaches = over_rows(expression, what=function)
    if any(each.first or each.offset or each.shift for each in reaches):
        raise InvalidArgument(f"{function} cannot contain a navigation")
    return Aggregate(function, row, names, final)
