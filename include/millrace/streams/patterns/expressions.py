"""The expressions of DEFINE and MEASURES as values: operations over what is read from the rows of a match.

A *row expression* is over one row: its columns, its classifier. A *match expression* is over a match, at one of its
rows: operations whose leaves are :class:`Reach` (a row expression at the row that a navigation leads to),
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
    """What a cast casts to."""


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
    """Which match of the partition it is, from 1 on."""


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
    """Names of the columns that are read, anywhere."""
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
    """Whether a row expression asks for the row's variable."""
    return isinstance(expression, Classifier) or (
        isinstance(expression, Call) and any(classifies(each) for each in expression.arguments)
    )


def conjuncts(expression: Expression) -> list[Expression]:
    """The conditions that all must hold, where it is an AND of such."""
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
        raise InvalidArgument(f"{what} cannot be taken over aggregates or MATCH_NUMBER()")
    reaches = [each for each in found if isinstance(each, Reach)]
    if len({(each.variables, each.first, each.offset, each.shift) for each in reaches}) > 1:
        raise InvalidArgument(f"all columns inside of {what} must be of one and the same variable")
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
    """``FIRST(expression, offset)`` or ``LAST(...)``. Raises InvalidArgument."""
    name = "FIRST" if first else "LAST"
    if offset < 0:
        raise InvalidArgument(f"{name} takes an offset of 0 or more")
    row, names, reaches = over_rows(expression, what=name)
    if any(each.first or each.offset or each.shift for each in reaches):
        raise InvalidArgument(f"{name} cannot be taken of another navigation; PREV(FIRST(A.x), 1) is the way round")
    return Reach(row, names, first=first, offset=offset, final=bool(final))


def shifted(expression: Expression, by: int, *, name: str) -> Expression:
    """``PREV(expression, n)`` (`by` < 0) or ``NEXT(expression, n)``. Raises InvalidArgument."""
    row, names, reaches = over_rows(expression, what=name)
    if any(each.shift for each in reaches):
        raise InvalidArgument(f"{name} cannot be taken of PREV or NEXT: write one with the sum of the offsets")
    at = reaches[0] if reaches else Reach(row)
    return Reach(row, names, first=at.first, offset=at.offset, shift=by, final=at.final)


def aggregated(function: str, expression: Expression | None, variables: tuple[str, ...], *, final: bool) -> Expression:
    """``function(expression)``; without one the rows themselves are counted. Raises InvalidArgument."""
    if function not in AGGREGATES:
        raise InvalidArgument(f"{function} is no aggregate; there are {', '.join(sorted(AGGREGATES))}")
    if expression is None:
        return Aggregate(function, None, variables, final)
    row, names, reaches = over_rows(expression, what=function)
    if any(each.first or each.offset or each.shift for each in reaches):
        raise InvalidArgument(f"{function} cannot be taken of a navigation")
    return Aggregate(function, row, names, final)
