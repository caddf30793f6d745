"""The parser of MATCH_RECOGNIZE: clauses by keyword, expressions by sqlglot, the pattern by a grammar of its own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.language import like_pieces
from millrace.streams.patterns import expressions as ours
from millrace.streams.patterns.clauses import Clause, clauses
from millrace.streams.patterns.expressions import Call, Constant, Expression, MatchNumber, Reach
from millrace.streams.patterns.pattern import parse as parse_pattern
from millrace.streams.patterns.pattern import variables
from millrace.streams.patterns.query import MatchRecognize, Order, Rows, Skip

_ROWS: Final[Mapping[str, Rows]] = {
    "": "all",
    "SHOW EMPTY MATCHES": "all",
    "OMIT EMPTY MATCHES": "all omit empty",
    "WITH UNMATCHED ROWS": "all with unmatched",
}
_BINARY: Final[Mapping[type[exp.Expression], str]] = {
    exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%", exp.DPipe: "||",
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
    exp.And: "and", exp.Or: "or", exp.Nullif: "nullif",
}  # fmt: skip
_UNARY: Final[Mapping[type[exp.Expression], str]] = {
    exp.Not: "not", exp.Neg: "negative", exp.Abs: "abs", exp.Floor: "floor", exp.Ceil: "ceil", exp.Sqrt: "sqrt",
    exp.Lower: "lower", exp.Upper: "upper", exp.Length: "length",
}  # fmt: skip
_LISTS: Final[Mapping[type[exp.Expression], str]] = {
    exp.Coalesce: "coalesce",
    exp.Greatest: "greatest",
    exp.Least: "least",
}
_AGGREGATES: Final[Mapping[type[exp.Expression], str]] = {
    exp.Count: "count", exp.Sum: "sum", exp.Avg: "avg", exp.Min: "min", exp.Max: "max", exp.ArrayAgg: "array_agg",
}  # fmt: skip
_CASTS: Final[Mapping[str, str]] = {
    "BOOLEAN": "boolean", "INT": "bigint", "BIGINT": "bigint", "SMALLINT": "bigint", "DOUBLE": "double",
    "FLOAT": "double",
    "VARCHAR": "varchar", "TEXT": "varchar", "DATE": "date", "TIMESTAMP": "timestamp",
}  # fmt: skip
_UNITS: Final[Mapping[str, timedelta]] = {
    "MILLISECOND": timedelta(milliseconds=1),
    "SECOND": timedelta(seconds=1),
    "MINUTE": timedelta(minutes=1),
    "HOUR": timedelta(hours=1),
    "DAY": timedelta(days=1),
    "WEEK": timedelta(weeks=1),
}


def parse(sql: str) -> MatchRecognize:
    """Return the query in `sql`: ``MATCH_RECOGNIZE (...)``, or the text in its parentheses. Raises InvalidArgument."""
    found = clauses(sql)
    if "pattern" not in found:
        raise InvalidArgument("MATCH_RECOGNIZE: PATTERN (...) is missing")
    closing = found["pattern"].words
    if closing[-1:] != [")"] or len(closing) < 2:
        raise InvalidArgument(
            "MATCH_RECOGNIZE: PATTERN (...) is not closed, or there is text between it and the next clause"
        )
    pattern = parse_pattern(found["pattern"].part(0, -1).text)
    subsets = dict(_subset(each) for each in _split_subsets(found["subset"])) if "subset" in found else {}
    reader = _Reader(variables(pattern), subsets)
    rows, skip, skip_to = _rows(found.get("rows")), *_skip(found.get("skip"))
    return MatchRecognize(
        pattern=pattern,
        order=tuple(_order(each) for each in found["order"].split()) if "order" in found else (),
        partition=tuple(_single(each) for each in found["partition"].split()) if "partition" in found else (),
        define=_named([reader.defined(each) for each in found["define"].split()], "DEFINE")
        if "define" in found
        else {},
        measures=_named([reader.measure(each) for each in found["measures"].split()], "MEASURES")
        if "measures" in found
        else {},
        subsets=subsets,
        rows=rows,
        skip=skip,
        skip_to=skip_to,
        within=_within(found["within"]) if "within" in found else None,
    )


def parse_expression(text: str, names: tuple[str, ...], subsets: Mapping[str, tuple[str, ...]]) -> Expression:
    """Return a condition or measure of a pattern with these variables. Raises InvalidArgument."""
    from millrace.streams.patterns.clauses import tokens_of

    return _Reader(names, subsets).read(Clause(text, tokens_of(text)))


def _named(items: list[tuple[str, Expression]], clause: str) -> dict[str, Expression]:
    found = dict(items)
    if len(found) < len(items):
        raise InvalidArgument(f"{clause} has a name twice")
    return found


def _single(clause: Clause) -> str:
    if len(clause) != 1:
        raise InvalidArgument(f"PARTITION BY takes columns, not {clause.text!r}")
    return clause.raw(0)


def _order(clause: Clause) -> Order:
    words = clause.words[1:]
    if words[-2:] == ["NULLS", "LAST"]:
        words = words[:-2]
    if words not in ([], ["ASC"], ["DESC"]):
        raise InvalidArgument(f"ORDER BY takes columns, with ASC or DESC and NULLS LAST, not {clause.text!r}")
    return Order(clause.raw(0), words == ["DESC"])


def _split_subsets(clause: Clause) -> list[Clause]:
    return clause.split()


def _subset(clause: Clause) -> tuple[str, tuple[str, ...]]:
    words = clause.words
    if len(words) < 5 or words[1:3] != ["=", "("] or words[-1] != ")":
        raise InvalidArgument(f"SUBSET is written U = (A, B), not {clause.text!r}")
    members = [each.name(0) for each in clause.part(3, -1).split()]
    return clause.name(0), tuple(members)


def _rows(clause: Clause | None) -> Rows:
    if clause is None:
        return "one"
    said = " ".join(clause.words)
    if clause.head[0] == "ONE" and not said:
        return "one"
    if clause.head[0] == "ALL" and said in _ROWS:
        return _ROWS[said]
    raise InvalidArgument(f"{' '.join(clause.head)} {said}: there are {', '.join(filter(None, _ROWS))} (of ALL ROWS)")


def _skip(clause: Clause | None) -> tuple[Skip, str]:
    if clause is None:
        return "past last row", ""
    words = clause.words
    match words:
        case ["PAST", "LAST", "ROW"]:
            return "past last row", ""
        case ["TO", "NEXT", "ROW"]:
            return "to next row", ""
        case ["TO", "FIRST", _]:
            return "to first", clause.name(2)
        case ["TO", "LAST", _]:
            return "to last", clause.name(2)
        case ["TO", _]:
            return "to last", clause.name(1)
    raise InvalidArgument(
        f"AFTER MATCH SKIP {clause.text}: there are PAST LAST ROW, TO NEXT ROW, TO FIRST v, TO LAST v, TO v"
    )


def _within(clause: Clause) -> timedelta | int:
    value = _Reader((), {}).read(clause)
    if isinstance(value, Constant) and isinstance(value.value, timedelta | int) and not isinstance(value.value, bool):
        return value.value
    raise InvalidArgument(
        f"WITHIN takes an interval, such as INTERVAL '1' HOUR, or a whole number; not {clause.text!r}"
    )


class _Reader:
    """A reader of the expressions of one pattern."""

    def __init__(self, names: tuple[str, ...], subsets: Mapping[str, tuple[str, ...]]) -> None:
        self._names = {each: (each,) for each in names} | dict(subsets)

    def defined(self, clause: Clause) -> tuple[str, Expression]:
        if clause.words[1:2] != ["AS"]:
            raise InvalidArgument(f"DEFINE is written A AS condition, not {clause.text!r}")
        return clause.name(0), self.read(clause.part(2))

    def measure(self, clause: Clause) -> tuple[str, Expression]:
        if len(clause) < 3 or clause.words[-2] != "AS":
            raise InvalidArgument(f"MEASURES is written expression AS name, not {clause.text!r}")
        return clause.raw(-1), self.read(clause.part(0, -2))

    def read(self, clause: Clause) -> Expression:
        """Return the expression of a clause. Raises InvalidArgument."""
        if not len(clause):
            raise InvalidArgument("MATCH_RECOGNIZE: an expression is missing")
        try:
            tree = sqlglot.parse_one(clause.called(), read="trino")
        except (SqlglotError, RecursionError) as error:
            raise InvalidArgument(f"{clause.text[:200]!r} is not an expression: {error}") from error
        try:
            return self._expression(tree)
        except InvalidArgument as error:
            raise InvalidArgument(f"{clause.text[:200]}: {error}") from error
        except RecursionError as error:
            raise InvalidArgument(f"{clause.text[:200]}: nested too deep") from error

    def _expression(self, node: Any) -> Expression:
        made = self._expression
        kind = type(node)
        if kind in _BINARY:
            return Call(_BINARY[kind], (made(node.this), made(node.expression)))
        if kind in _UNARY:
            return Call(_UNARY[kind], (made(node.this),))
        if kind in _LISTS:
            return Call(_LISTS[kind], tuple(made(each) for each in (node.this, *node.expressions)))
        if kind in _AGGREGATES:
            return self._aggregate(node, final=False)
        match node:
            case exp.Paren():
                return made(node.this)
            case exp.Column():
                return self._column(node)
            case exp.Literal() | exp.Boolean() | exp.Null() | exp.Interval():
                return Constant(_literal(node))
            case exp.Cast():
                return self._cast(node)
            case exp.Like() | exp.Escape():
                return self._like(node)
            case exp.Is():
                if not isinstance(node.expression, exp.Null):
                    raise InvalidArgument("IS is followed by NULL or NOT NULL")
                return Call("is null", (made(node.this),))
            case exp.In() if node.expressions:
                return Call("in", tuple(made(each) for each in (node.this, *node.expressions)))
            case exp.Between():
                subject = made(node.this)
                low, high = made(node.args["low"]), made(node.args["high"])
                return Call("and", (Call(">=", (subject, low)), Call("<=", (subject, high))))
            case exp.Case():
                return self._case(node)
            case exp.If():
                otherwise = node.args.get("false")
                return Call(
                    "case", (made(node.this), made(node.args["true"]), made(otherwise) if otherwise else Constant(None))
                )
            case exp.First() | exp.Last():
                return self._navigated(node, final=False)
            case exp.Anonymous():
                return self._called(node)
        raise InvalidArgument(f"{node.sql(dialect='trino')} is not supported in MATCH_RECOGNIZE")

    def _called(self, node: Any) -> Expression:
        name, arguments = str(node.this).upper(), node.expressions
        if name in ("FINAL_", "RUNNING_") and len(arguments) == 1:
            inside, final = arguments[0], name == "FINAL_"
            if isinstance(inside, exp.First | exp.Last):
                return self._navigated(inside, final=final)
            if type(inside) in _AGGREGATES:
                return self._aggregate(inside, final=final)
            raise InvalidArgument(f"{name[:-1]} is allowed only before FIRST, LAST and aggregates")
        if name == "MATCH_NUMBER" and not arguments:
            return MatchNumber()
        if name == "CLASSIFIER" and len(arguments) <= 1:
            return Reach(ours.Classifier(), self._variables(arguments[0]) if arguments else ())
        if name in ("PREV", "NEXT") and 1 <= len(arguments) <= 2:
            offset = _offset(arguments[1]) if len(arguments) == 2 else 1
            return ours.shifted(self._expression(arguments[0]), -offset if name == "PREV" else offset, name=name)
        raise InvalidArgument(f"there is no function {name} with {len(arguments)} arguments in MATCH_RECOGNIZE")

    def _navigated(self, node: Any, *, final: bool) -> Expression:
        offset = node.args.get("expression")
        return ours.navigated(
            self._expression(node.this),
            first=isinstance(node, exp.First),
            offset=0 if offset is None else _offset(offset),
            final=final,
        )

    def _aggregate(self, node: Any, *, final: bool) -> Expression:
        function, inside = _AGGREGATES[type(node)], node.this
        if isinstance(inside, exp.Distinct):
            raise InvalidArgument(f"{function.upper()}(DISTINCT ...) is not supported")
        if isinstance(inside, exp.Star):
            return ours.aggregated(function, None, (), final=final)
        if isinstance(inside, exp.Column) and isinstance(inside.this, exp.Star):
            return ours.aggregated(function, None, self._variables(inside.args["table"]), final=final)
        if inside is None:
            return ours.aggregated(function, None, (), final=final)
        return ours.aggregated(function, self._expression(inside), (), final=final)

    def _column(self, node: Any) -> Expression:
        if node.args.get("db"):
            raise InvalidArgument(f"{node.sql()}: a column is written A.column or column")
        of = self._variables(node.args["table"]) if node.args.get("table") else ()
        return Reach(ours.Column(node.name), of)

    def _variables(self, node: Any) -> tuple[str, ...]:
        identifier = node.this if isinstance(node, exp.Column) else node
        quoted = bool(getattr(identifier, "quoted", False) or identifier.args.get("quoted"))
        name = identifier.name if quoted else identifier.name.upper()
        if name not in self._names:
            raise InvalidArgument(f"{name} is not a variable of the pattern")
        return self._names[name]

    def _cast(self, node: Any) -> Expression:
        kind = _CASTS.get(node.to.this.name)
        if kind is None:
            raise InvalidArgument(f"no cast to {node.to.sql()}; use {', '.join(sorted(set(_CASTS.values())))}")
        if isinstance(node.this, exp.Literal) and kind in ("date", "timestamp"):
            try:
                return Constant(date.fromisoformat(node.this.name) if kind == "date" else _moment(node.this.name))
            except ValueError as error:
                raise InvalidArgument(f"{node.this.name!r} is not a {kind}") from error
        return Call("cast", (self._expression(node.this),), kind)

    def _like(self, node: Any) -> Expression:
        """Return a LIKE whose pattern escapes with a backslash, whatever the ESCAPE of the text."""
        escape = "\\"
        if isinstance(node, exp.Escape):
            escape, node = self._escape(node.expression), node.this
        pattern = node.expression
        if not isinstance(node, exp.Like) or not isinstance(pattern, exp.Literal) or not pattern.is_string:
            raise InvalidArgument("LIKE takes a literal pattern")
        try:
            pieces = list(like_pieces(pattern.name, escape))
        except ValueError as error:
            raise InvalidArgument(f"LIKE {pattern.name!r}: {error}") from None
        found = "".join(f"\\{each}" if not wild and each in "%_\\" else each for each, wild in pieces)
        return Call("like", (self._expression(node.this), Constant(found)))

    def _escape(self, node: Any) -> str:
        sign = _literal(node) if isinstance(node, exp.Literal) else None
        if not isinstance(sign, str) or len(sign) != 1:
            raise InvalidArgument("ESCAPE takes one character in quotes")
        return sign

    def _case(self, node: Any) -> Expression:
        subject = self._expression(node.this) if node.this is not None else None
        found: list[Expression] = []
        for each in node.args["ifs"]:
            condition = self._expression(each.this)
            found += [
                condition if subject is None else Call("=", (subject, condition)),
                self._expression(each.args["true"]),
            ]
        otherwise = node.args.get("default")
        return Call("case", (*found, self._expression(otherwise) if otherwise is not None else Constant(None)))


def _moment(text: str) -> datetime:
    from datetime import UTC

    found = datetime.fromisoformat(text)
    return found.astimezone(UTC).replace(tzinfo=None) if found.tzinfo else found


def _offset(node: Any) -> int:
    if not (isinstance(node, exp.Literal) and not node.is_string and node.name.isdigit()):
        raise InvalidArgument("an offset must be a literal whole number")
    return int(node.name)


def _literal(node: Any) -> Any:
    match node:
        case exp.Boolean():
            return bool(node.this)
        case exp.Null():
            return None
        case exp.Interval():
            unit = str(node.unit).upper().removesuffix("S")
            if unit not in _UNITS or not isinstance(node.this, exp.Literal):
                raise InvalidArgument(f"{node.sql()}: an interval is INTERVAL 'number' of {', '.join(_UNITS)}")
            try:
                return float(node.this.name) * _UNITS[unit]
            except (ValueError, OverflowError) as error:
                raise InvalidArgument(f"{node.sql()}: {error}") from error
    if node.is_string:
        return node.name
    if node.name.isdigit():
        number = int(node.name)
        if number >= 1 << 63:
            raise InvalidArgument(f"{number} is too large")
        return number
    return float(Decimal(node.name))
