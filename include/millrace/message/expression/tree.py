"""Expressions over a row as typed trees: the operations, their types, and their form in a schema's JSON.

The grammar is closed: no clock, no regular expression, no collation, no dependence on locale or host.
docs/expressions.md defines the results; :mod:`millrace.message.expression.kernels` computes them, in the same way for a
chain version.

A :class:`Node` that exists is well-formed and has the one type that its parts determine; otherwise InvalidArgument says
why. :func:`node_from_json` accepts any JSON value, in time bounded by its size. Equal trees have equal JSON.

Values have fewer types than fields: all integers are ``int64``, both floats ``float64``, uuid and json are ``string``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.field_types import MAX_PRECISION, FieldType, parse_type

MAX_NODES: Final = 500
"""Maximum nodes of one tree."""
MAX_LEVELS: Final = 64
TOO_LARGE: Final = f"an expression has at most {MAX_NODES} parts in {MAX_LEVELS} levels"
MAX_LITERAL: Final = 1_000
"""Maximum characters of a literal's text."""

NUMBERS: Final = frozenset({"int64", "float64", "decimal"})
INSTANTS: Final = frozenset({"timestamp", "timestamp_ntz"})
TEXTS: Final = frozenset({"string", "binary"})
SCALARS: Final = NUMBERS | INSTANTS | TEXTS | {"bool", "date"}

_VALUE_KINDS: Final = {
    **dict.fromkeys(("int8", "int16", "int32", "int64"), "int64"),
    **dict.fromkeys(("float32", "float64"), "float64"),
    **dict.fromkeys(("string", "uuid", "json"), "string"),
}

COMPARISONS: Final = ("=", "!=", "<", "<=", ">", ">=")
PARTS_OF_DATES: Final = ("year", "month", "day")
PARTS_OF_TIMES: Final = ("hour", "minute", "second")
CASTS: Final = frozenset(
    {
        ("int64", "float64"),
        ("int64", "decimal"),
        ("int64", "string"),
        ("bool", "int64"),
        ("float64", "int64"),
        ("decimal", "int64"),
        ("decimal", "decimal"),
        ("date", "timestamp"),
        ("date", "timestamp_ntz"),
        ("timestamp", "date"),
        ("timestamp_ntz", "date"),
        ("timestamp", "timestamp_ntz"),
        ("timestamp_ntz", "timestamp"),
    }
)
"""(from, to), by kind. Timestamps with and without a zone are both read as UTC."""

_VARIADIC: Final = frozenset({"and", "or", "in", "coalesce", "case", "||"})
_ARITY: Final[dict[str, int]] = {
    **dict.fromkeys(("field", "literal", "null", "now"), 0),
    **dict.fromkeys(("not", "is_null", "neg", "abs", "length", "ascii_lower", "ascii_upper", "cast", "round"), 1),
    **dict.fromkeys((*PARTS_OF_DATES, *PARTS_OF_TIMES, "substring"), 1),
    **dict.fromkeys((*COMPARISONS, "+", "-", "*", "/", "div", "%", "starts_with", "ends_with", "contains"), 2),
}
_GIVEN: Final[dict[str, int]] = {"literal": 2, "null": 1, "cast": 1, "round": 1, "substring": 2}
"""The number of text parameters of an operation; a field has its path, the others none."""

FUNCTIONS: Final = (
    *("abs", "round", "div", "coalesce", "length", "substring", "starts_with", "ends_with", "contains"),
    *("ascii_lower", "ascii_upper", *PARTS_OF_DATES, *PARTS_OF_TIMES),
)
"""Operations with function syntax, for people to read; besides them there are operators, CASE and CAST."""

FieldTypes = Mapping[str, FieldType]


@dataclass(frozen=True, slots=True)
class Node:
    """An operation on values; :func:`make_node` creates and types it."""

    op: str
    args: tuple[Node, ...]
    params: tuple[str, ...]
    """A field's path; a literal's type and text; the type of a cast or a null; round's digits; substring's start and
    length."""
    kind: str
    """The type of its value, as text."""

    @property
    def parsed_type(self) -> FieldType:
        """The type, parsed."""
        return parse_type(self.kind)


def value_kind(field: FieldType) -> str:
    """Return the type of a field's values in an expression."""
    return _VALUE_KINDS.get(field.kind, field.text)


def make_node(op: str, args: tuple[Node, ...], given: tuple[str, ...], fields: FieldTypes) -> Node:
    """Return the node of an operation on `args`. Raises InvalidArgument if it does not exist or does not take these
    types.
    """
    wanted = _ARITY.get(op)
    if wanted is None and op not in _VARIADIC:
        raise InvalidArgument(f"there is no operation {op!r} in an expression")
    if (len(args) != wanted) if wanted is not None else not args:
        raise InvalidArgument(f"{op} takes {wanted if wanted is not None else 'one or more'} values, not {len(args)}")
    if op != "field" and len(given) != _GIVEN.get(op, 0):
        raise InvalidArgument(f"{op} takes {_GIVEN.get(op, 0)} texts, not {len(given)}")
    return Node(op, args, given, _kind(op, args, given, fields))


def retype(node: Node, fields: FieldTypes) -> Node:
    """Return the same expression over fields of other types. Raises InvalidArgument if it is no longer valid."""
    return make_node(node.op, tuple(retype(each, fields) for each in node.args), node.params, fields)


def rename_field(node: Node, path: tuple[str, ...], to: str) -> Node:
    """Return the same expression with a field, or one inside it, renamed."""
    given = (*path[:-1], to, *node.params[len(path) :]) if _names(node, path) else node.params
    return Node(node.op, tuple(rename_field(each, path, to) for each in node.args), given, node.kind)


def references(node: Node, path: tuple[str, ...]) -> bool:
    """Return whether it uses the field at a path, or one inside it."""
    return _names(node, path) or any(references(each, path) for each in node.args)


def _names(node: Node, path: tuple[str, ...]) -> bool:
    return node.op == "field" and node.params[: len(path)] == path


def field_names(node: Node) -> set[str]:
    """Return the fields that it uses."""
    return ({node.params[0]} if node.op == "field" else set()).union(*(field_names(each) for each in node.args))


def check_size(node: Node) -> Node:
    """Return `node`. Raises InvalidArgument if it exceeds the size or depth that a schema allows."""
    nodes, levels = _size(node)
    if nodes > MAX_NODES or levels > MAX_LEVELS:
        raise InvalidArgument(TOO_LARGE)
    return node


def _size(node: Node) -> tuple[int, int]:
    parts = [_size(each) for each in node.args]
    return 1 + sum(nodes for nodes, _ in parts), 1 + max((levels for _, levels in parts), default=0)


def node_to_json(node: Node) -> list[list[Any]]:
    """Return the tree as a flat list, each operation after its arguments.

    Examples: ``["field", …]``, ``["literal", type, text]``, ``["+"]``, ``["coalesce", 3]`` (the number of arguments,
    for operations that take any number).
    """
    mine = [node.op, *node.params, *([len(node.args)] if node.op in _VARIADIC else [])]
    return [*(step for each in node.args for step in node_to_json(each)), mine]


def node_from_json(value: object, fields: FieldTypes) -> Node:
    """Invert :func:`node_to_json` over `fields`. Raises Malformed for another shape, InvalidArgument if it is not an
    expression.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_NODES:
        raise Malformed(f"an expression is a list of 1 to {MAX_NODES} operations")
    stack: list[tuple[Node, int]] = []
    for step in value:
        if not isinstance(step, list) or not step or not isinstance(step[0], str):
            raise Malformed("an operation is a list that begins with its name")
        op, *given = step
        count = given.pop() if op in _VARIADIC and given else _ARITY.get(op, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(stack):
            raise Malformed("an operation follows as many values as it takes")
        if not all(isinstance(each, str) for each in given):
            raise Malformed("the arguments of an operation are texts")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        levels = 1 + max((each for _, each in taken), default=0)
        if levels > MAX_LEVELS:
            raise InvalidArgument(TOO_LARGE)
        stack.append((make_node(op, tuple(node for node, _ in taken), tuple(given), fields), levels))
    if len(stack) != 1:
        raise Malformed("an expression comes to one value")
    return stack[0][0]


def _kind(op: str, args: tuple[Node, ...], given: tuple[str, ...], fields: FieldTypes) -> str:
    kinds = [each.kind for each in args]
    match op:
        case "field":
            return _field_kind(given, fields)
        case "literal":
            return literal_kind(*given)
        case "null":
            return _scalar(given[0])
        case "now":
            return "timestamp"
        case "is_null":
            return "bool"
        case "and" | "or" | "not":
            _require(op, all(each == "bool" for each in kinds), kinds)
            return "bool"
        case _ if op in COMPARISONS:
            _require(op, _comparable(*kinds), kinds)
            return "bool"
        case "in":
            literals = all(each.op == "literal" for each in args[1:])
            _require(op, literals and all(_comparable(kinds[0], each) for each in kinds[1:]), kinds)
            return "bool"
        case "starts_with" | "ends_with" | "contains":
            _require(op, kinds == ["string", "string"] and args[1].op == "literal", kinds)
            return "bool"
        case "+" | "-" | "*" | "/" | "div" | "%" | "neg" | "abs" | "round":
            return _number_kind(op, kinds, given)
        case "coalesce":
            return _common(op, kinds)
        case "case":
            conditions = kinds[:-1:2]
            _require(op, len(kinds) % 2 == 1 and all(each == "bool" for each in conditions), kinds)
            return _common(op, [*kinds[1::2], kinds[-1]])
        case "cast":
            target = _scalar(given[0])
            _require(f"cast to {target}", (_plain(kinds[0]), _plain(target)) in CASTS, kinds)
            return target
        case "||":
            _require(op, all(each == "string" for each in kinds) and not any(map(_joins, args)), kinds)
            return "string"
        case "length":
            _require(op, kinds[0] in TEXTS, kinds)
            return "int64"
        case "substring":
            _require(op, kinds[0] == "string" and all(_digits(each, 9) for each in given) and given[0] != "0", kinds)
            return "string"
        case "ascii_lower" | "ascii_upper":
            _require(op, kinds[0] == "string", kinds)
            return "string"
    _require(op, kinds[0] in INSTANTS or (op in PARTS_OF_DATES and kinds[0] == "date"), kinds)
    return "int64"


def _require(op: str, holds: bool, kinds: list[str]) -> None:
    if not holds:
        raise InvalidArgument(f"{op} does not take {', '.join(kinds)} (docs/expressions.md says what it takes)")


def _joins(node: Node) -> bool:
    """Return whether its text is concatenated: nested concatenation could grow any length from a short tree."""
    return node.op == "||" or any(map(_joins, node.args))


def _plain(kind: str) -> str:
    return "decimal" if kind.startswith("decimal(") else kind


def _scalar(kind: str) -> str:
    tree = parse_type(kind)
    if tree.text != kind or _plain(kind) not in SCALARS:
        raise InvalidArgument(
            f"{kind!r} is no type of a value: bool, int64, float64, decimal(p,s), string, binary, date, timestamp …"
        )
    return kind


def _field_kind(path: tuple[str, ...], fields: FieldTypes) -> str:
    if not path or path[0] not in fields:
        raise InvalidArgument(f"there is no field {'.'.join(path)!r}; there are {', '.join(fields)}")
    found = fields[path[0]]
    for name in path[1:]:
        if found.kind != "struct" or name not in found.names:
            raise InvalidArgument(f"there is no field {'.'.join(path)!r}")
        found = found.children[found.names.index(name)]
    return value_kind(found)


def _comparable(one: str, other: str) -> bool:
    if _plain(one) == _plain(other) == "decimal":
        return common_decimal([one, other]) is not None
    return one == other and one in SCALARS


def common_decimal(kinds: list[str]) -> FieldType | None:
    """Return the decimal type that holds the values of all `kinds`; None if there is none."""
    trees = [parse_type(each) for each in kinds]
    scale = max(each.scale for each in trees)
    digits = scale + max(each.precision - each.scale for each in trees)
    return FieldType("decimal", precision=digits, scale=scale) if digits <= MAX_PRECISION else None


def _common(op: str, kinds: list[str]) -> str:
    if all(_plain(each) == "decimal" for each in kinds):
        found = common_decimal(kinds)
        if found is not None:
            return found.text
    _require(op, len(set(kinds)) == 1 and _plain(kinds[0]) in SCALARS, kinds)
    return kinds[0]


def _number_kind(op: str, kinds: list[str], given: tuple[str, ...]) -> str:
    if all(_plain(each) == "decimal" for each in kinds):
        return _decimal_kind(op, [parse_type(each) for each in kinds], given, kinds)
    same = len(set(kinds)) == 1
    allowed = {"/": ("float64",), "div": ("int64",), "%": ("int64",), "round": ()}.get(op, ("int64", "float64"))
    _require(op, same and kinds[0] in allowed, kinds)
    return kinds[0]


def _decimal_kind(op: str, types: list[FieldType], given: tuple[str, ...], kinds: list[str]) -> str:
    first = types[0]
    match op:
        case "neg" | "abs":
            return first.text
        case "round":
            _require(op, _digits(given[0], 2) and int(given[0]) <= first.scale, kinds)
            scale = int(given[0])
            precision = max(1, min(MAX_PRECISION, first.precision - first.scale + scale + (scale < first.scale)))
            return FieldType("decimal", precision=max(precision, scale), scale=scale).text
        case "+" | "-":
            scale = max(each.scale for each in types)
            precision = scale + max(each.precision - each.scale for each in types) + 1
        case "*":
            scale = sum(each.scale for each in types)
            precision = sum(each.precision for each in types) + 1
        case _:
            precision = scale = MAX_PRECISION + 1
            _require(op, False, kinds)
    if precision > MAX_PRECISION:
        raise InvalidArgument(
            f"{op} of {' and '.join(kinds)} would need {precision} digits, and a decimal has {MAX_PRECISION}: cast"
            " what it is made of"
            " to a decimal with fewer"
        )
    return FieldType("decimal", precision=precision, scale=scale).text


def _digits(text: str, most: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= most and str(int(text)) == text


def literal_kind(kind: str, text: str) -> str:
    """Return the type of a literal whose text is canonical. Raises InvalidArgument otherwise."""
    if len(text) > MAX_LITERAL:
        raise InvalidArgument(f"a literal has at most {MAX_LITERAL} characters")
    found = literal_value(_scalar(kind), text)
    if literal_text(kind, found) != text:
        raise InvalidArgument(f"the literal {text!r} of {kind} is written {literal_text(kind, found)!r}")
    return kind


def literal_value(kind: str, text: str) -> Any:
    """Return a literal's value: bool, int (int64; a date's days; a timestamp's microseconds), float, Decimal, str or
    bytes.
    """
    try:
        match _plain(kind):
            case "bool" if text in ("true", "false"):
                return text == "true"
            case "int64" if -(1 << 63) <= (number := int(text)) < 1 << 63:
                return number
            case "float64":
                real = float(text)
                if real - real == 0:
                    return real
            case "decimal":
                return _decimal(kind, Decimal(text))
            case "string":
                return text
            case "binary":
                return bytes.fromhex(text)
            case "date":
                return (date.fromisoformat(text) - date(1970, 1, 1)).days
            case "timestamp" | "timestamp_ntz":
                moment = datetime.fromisoformat(text).replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
                return (moment.days * 86_400 + moment.seconds) * 1_000_000 + moment.microseconds
    except (ValueError, InvalidOperation):
        pass
    raise InvalidArgument(f"{text!r:.80} is no {kind}")


def literal_text(kind: str, value: Any) -> str:
    """Return the canonical text of a literal's value."""
    match _plain(kind):
        case "bool":
            return "true" if value else "false"
        case "float64":
            return repr(value)
        case "binary":
            return str(value.hex())
        case "date":
            return date.fromordinal(date(1970, 1, 1).toordinal() + value).isoformat()
        case "timestamp" | "timestamp_ntz":
            seconds, micros = divmod(value, 1_000_000)
            days, seconds = divmod(seconds, 86_400)
            day = date.fromordinal(date(1970, 1, 1).toordinal() + days).isoformat()
            return f"{day}T{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}"
        case "decimal":
            return f"{value:f}"
    return str(value)


def _decimal(kind: str, value: Decimal) -> Decimal:
    tree = parse_type(kind)
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or abs(exponent) > MAX_PRECISION or len(digits) > 2 * MAX_PRECISION:
        raise ValueError
    unscaled = int("".join(map(str, digits)))
    shift = exponent + tree.scale
    unscaled, rest = (unscaled * 10**shift, 0) if shift >= 0 else divmod(unscaled, 10**-shift)
    if rest or unscaled >= 10**tree.precision:
        raise ValueError
    return Decimal((sign if unscaled else 0, tuple(map(int, str(unscaled))), -tree.scale))
