"""Bind parsed expressions to typed trees: resolve names, give literals the type of their neighbours, insert lossless
casts.

Programs that write schemas do this; hosts that judge rows have the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from millrace.base.errors import InvalidArgument
from millrace.base.predicate.expressions import parse_scalar_expression as parsed
from millrace.base.predicate.language import (
    And,
    ColumnRef,
    Compare,
    FunctionCall,
    In,
    IsNull,
    Like,
    Literal,
    Not,
    Or,
    like_text,
)
from millrace.message.expression.tree import (
    COMPARISONS,
    INSTANTS,
    TOO_LARGE,
    FieldTypes,
    Node,
    check_size,
    common_decimal,
    literal_text,
    make_node,
    value_kind,
)
from millrace.message.field_types import FieldType, parse_type

_INT64_DECIMAL: Final = "decimal(19,0)"
_ALIASES: Final = {"int": "int64", "bigint": "int64", "double": "float64", "float": "float64", "text": "string"}


def bind_condition(text: str, fields: FieldTypes) -> Node:
    """Bind `text` as a condition over `fields`. Raises InvalidArgument."""
    return _bound(text, fields, "bool")


def bind_computed(text: str, fields: FieldTypes, kind: FieldType) -> Node:
    """Bind `text` over `fields` as the value of a field of type `kind`. Raises InvalidArgument."""
    return _bound(text, fields, value_kind(kind))


def _bound(text: str, fields: FieldTypes, kind: str) -> Node:
    try:
        return check_size(_Binder(fields).typed(parsed(text), kind))
    except RecursionError:
        raise InvalidArgument(TOO_LARGE) from None


def bind_default(value: object, kind: FieldType) -> Node:
    """Return a field's default: a value of its type, or ``now()`` of a date or timestamp. Raises InvalidArgument."""
    wanted = value_kind(kind)
    if wanted in (*INSTANTS, "date") and isinstance(value, str) and value.strip().lower() == "now()":
        now = make_node("now", (), (), {})
        return now if wanted == "timestamp" else make_node("cast", (now,), (wanted,), {})
    if kind.kind in ("uuid", "json", "binary") or kind.is_nested:
        raise InvalidArgument(f"a field of type {kind.text} has no default")
    if isinstance(value, str):
        value = _of_text(value, wanted)
    if isinstance(value, bool | int | str):
        return _literal(value, wanted)
    if isinstance(value, float | Decimal):
        return _literal(Decimal(repr(value)) if isinstance(value, float) else value, wanted)
    if isinstance(value, datetime):
        return _literal((value.astimezone(UTC) if value.tzinfo else value).replace(tzinfo=None).isoformat(), wanted)
    if isinstance(value, date):
        return _literal(value.isoformat(), wanted)
    raise InvalidArgument(f"{value!r:.60} is no default of a field of type {kind.text}")


def _of_text(text: str, kind: str) -> Any:
    """Parse text as a number or bool; leave it unchanged for other types."""
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in ("int64", "float64") or kind.startswith("decimal("):
        try:
            return Decimal(text)
        except InvalidOperation:
            raise InvalidArgument(f"{text!r:.60} is no {kind}") from None
    return text


def _literal(value: Any, kind: str) -> Node:
    """Return a literal of the type, if it holds the value."""
    plain = "decimal" if kind.startswith("decimal(") else kind
    text: str | None = None
    match value:
        case bool():
            text = literal_text("bool", value) if plain == "bool" else None
        case int() | Decimal() if plain == "float64":
            text = repr(float(value))
        case int() if plain == "int64":
            text = str(value)
        case Decimal() if plain == "int64" and value == value.to_integral_value() and abs(value) < 1 << 63:
            text = str(int(value))
        case int() | Decimal() if plain == "decimal":
            text = _decimal_text(Decimal(value), parse_type(kind))
        case str() if plain == "string":
            text = value
        case str() if plain == "date":
            text = value.strip()
        case str() if plain in INSTANTS:
            text = _moment_text(value)
        case bytes() if plain == "binary":
            text = value.hex()
    if text is None:
        raise InvalidArgument(f"{value!r:.60} is no {kind}")
    return make_node("literal", (), (kind, text), {})


def _decimal_text(value: Decimal, kind: FieldType) -> str | None:
    text = f"{value:f}"
    whole, _, fraction = text.partition(".")
    fraction = fraction.rstrip("0")
    if len(fraction) > kind.scale:
        return None
    fraction = fraction.ljust(kind.scale, "0")
    text = f"{whole}.{fraction}" if fraction else whole
    return text.removeprefix("-") if not any(each in "123456789" for each in text) else text


def _moment_text(value: str) -> str | None:
    try:
        found = datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    found = (found.astimezone(UTC) if found.tzinfo else found).replace(tzinfo=None)
    return found.isoformat(timespec="microseconds")


def _own_kind(value: Any) -> str:
    """Return the type of a literal without typed neighbours."""
    match value:
        case bool():
            return "bool"
        case int():
            return "int64"
        case str():
            return "string"
        case bytes():
            return "binary"
    _, digits, exponent = value.as_tuple()
    scale = max(0, -exponent)
    return f"decimal({max(len(digits) + max(0, exponent), scale, 1)},{scale})"


class _Binder:
    """Binds one expression.

    On every level a part is bound without a type, then with its neighbours' type. Results are cached by part: without
    the cache, twenty levels would bind a part a million times.
    """

    def __init__(self, fields: FieldTypes) -> None:
        self._fields = fields
        self._known: dict[tuple[int, str | None], tuple[Any, Node]] = {}

    def typed(self, found: Any, kind: str | None) -> Node:
        """Return the node of a parsed part, cast to `kind` if given. Raises InvalidArgument."""
        node = self._node(found, kind)
        return node if kind is None else self._as(node, kind)

    def _make(self, op: str, args: Sequence[Node], *given: str) -> Node:
        return make_node(op, tuple(args), given, self._fields)

    def _as(self, node: Node, kind: str) -> Node:
        if node.kind == kind:
            return node
        pair = tuple("decimal" if each.startswith("decimal(") else each for each in (node.kind, kind))
        if pair in (
            ("int64", "decimal"),
            ("int64", "float64"),
            ("decimal", "decimal"),
            ("date", "timestamp"),
            ("date", "timestamp_ntz"),
        ):
            return self._make("cast", [node], kind)
        raise InvalidArgument(
            f"{node.kind} where {kind} is wanted: write cast(… AS {kind}), where there is such a cast"
        )

    def _node(self, found: Any, kind: str | None) -> Node:
        """Return the node of a parsed part; a literal gets type `kind` if that holds it."""
        if (id(found), kind) not in self._known:
            self._known[id(found), kind] = (found, self._fresh(found, kind))
        return self._known[id(found), kind][1]

    def _fresh(self, found: Any, kind: str | None) -> Node:
        match found:
            case ColumnRef(path):
                return self._make("field", [], *path)
            case Literal(value):
                return _literal(value, kind if kind is not None and self._fits(value, kind) else _own_kind(value))
            case And(parts) | Or(parts):
                op = "and" if isinstance(found, And) else "or"
                return self._make(op, [self.typed(each, "bool") for each in parts])
            case Not(part):
                return self._make("not", [self.typed(part, "bool")])
            case IsNull(subject):
                return self._make("is_null", [self.typed(subject, None)])
            case Compare(op, left, right):
                return self._make(op, self._alike([left, right]))
            case In(subject, values):
                alike = self._alike([subject, *values])
                return (
                    self._make("in", alike)
                    if len(alike) > 1
                    else self._make("and", [self._make("literal", [], "bool", "false")])
                )
            case Like(subject, pattern):
                return self._like(self.typed(subject, "string"), pattern)
            case FunctionCall(name, args, cast_to):
                return self._call(name, list(args), cast_to, kind)
        raise InvalidArgument(f"{found!r:.80} is no part of an expression")

    def _fits(self, value: Any, kind: str) -> bool:
        try:
            _literal(value, kind)
        except InvalidArgument:
            return False
        return True

    def _alike(self, parts: list[Any]) -> list[Node]:
        """Return nodes of one type: literals adopt the others' type, integers are cast to it."""
        known = [
            self._node(each, None) for each in parts if not isinstance(each, Literal) and each != FunctionCall("null")
        ]
        kinds = list(dict.fromkeys(each.kind for each in known))
        literals = [each.value for each in parts if isinstance(each, Literal)]
        kind = self._common(kinds, literals)
        nodes: list[Node] = []
        for each in parts:
            node = self._node(each, kind) if isinstance(each, Literal | FunctionCall) else self._node(each, None)
            decimals = node.kind.startswith("decimal(") and kind is not None and kind.startswith("decimal(")
            nodes.append(node if kind is None or decimals else self._as(node, kind))
        return nodes

    def _common(self, kinds: list[str], literals: list[Any]) -> str | None:
        if not kinds:
            kinds = list(dict.fromkeys(_own_kind(each) for each in literals))
        if not kinds:
            return None
        if "float64" in kinds:
            return "float64"
        decimals = [each for each in kinds if each.startswith("decimal(")]
        if kinds == ["int64"] and any(isinstance(each, Decimal) for each in literals):
            decimals = [_own_kind(each) for each in literals if isinstance(each, Decimal)]
        if decimals:
            return (
                decimals[0]
                if len(decimals) == len(kinds) == 1 and "int64" not in kinds
                else self._wide(decimals, "int64" in kinds)
            )
        for instant in INSTANTS:
            if instant in kinds:
                return instant
        return kinds[0]

    def _wide(self, decimals: list[str], integers: bool) -> str:
        found = common_decimal([*decimals, *([_INT64_DECIMAL] if integers else [])])
        if found is None:
            raise InvalidArgument(
                f"no decimal holds the values of {', '.join(decimals)}{' and int64' if integers else ''}: cast one"
            )
        return found.text

    def _like(self, subject: Node, pattern: str) -> Node:
        found = like_text(pattern)
        if found is None:
            raise InvalidArgument(f"LIKE {pattern!r}: here a pattern is a text with % before it, after it or both")
        inner, begins, ends = found
        text = self._make("literal", [], "string", inner)
        if begins and ends:
            return self._make("contains", [subject, text])
        if begins or ends:
            return self._make("ends_with" if begins else "starts_with", [subject, text])
        return self._make("=", [subject, text])

    def _call(self, name: str, args: list[Any], cast_to: str, kind: str | None) -> Node:
        match name:
            case "null":
                return self._make("null", [], kind or "bool")
            case "case":
                conditions = [self.typed(each, "bool") for each in args[:-1:2]]
                values = self._branches([*args[1::2], args[-1]], kind)
                pairs = [each for pair in zip(conditions, values, strict=False) for each in pair]
                return self._make("case", [*pairs, values[-1]])
            case "coalesce":
                return self._make("coalesce", self._branches(args, kind))
            case "+" | "-" | "*" | "%":
                return self._make(name, self._operands(args))
            case "/":
                return self._make(
                    "/", [self._as(each, "float64") for each in (self._node(part, "float64") for part in args)]
                )
            case "||" | "concat":
                return self._make("||", [self.typed(each, "string") for each in args])
            case "cast":
                target = parse_type(_ALIASES.get(cast_to, cast_to))
                node = self._node(args[0], None)
                if node.kind == value_kind(target):
                    return node
                return self._make("cast", [node], value_kind(target))
            case "round":
                return self._make(
                    "round", [self._node(args[0], None)] if args else [], *self._numbers(args[1:] or [Literal(0)])
                )
            case "substring" | "substr":
                return self._make("substring", [self._node(args[0], None)] if args else [], *self._numbers(args[1:]))
            case "field" | "literal" | "is_null" | "and" | "or" | "not" | "in" | "now":
                raise InvalidArgument(f"there is no function {name!r} in an expression (now() is a default alone)")
        if name in COMPARISONS:
            raise InvalidArgument(f"there is no function {name!r} in an expression")
        return self._make(name, [self._node(each, None) for each in args])

    def _operands(self, args: list[Any]) -> list[Node]:
        """Return both operands of arithmetic. A decimal keeps its own digits beside another."""
        nodes = [self._node(each, None) for each in args]
        if any(each.kind == "float64" for each in nodes):
            return [self._as(self._node(each, "float64"), "float64") for each in args]
        if any(each.kind.startswith("decimal(") for each in nodes):
            return [
                node if node.kind.startswith("decimal(") else self._integer(each, node)
                for each, node in zip(args, nodes, strict=True)
            ]
        return nodes

    def _integer(self, found: Any, node: Node) -> Node:
        if isinstance(found, Literal) and isinstance(found.value, int):
            return _literal(found.value, f"decimal({len(str(abs(found.value)))},0)")
        return self._as(node, _INT64_DECIMAL)

    def _branches(self, parts: list[Any], kind: str | None) -> list[Node]:
        if kind is not None:
            nodes = [self._node(each, kind) for each in parts]
            if all(each.kind == kind for each in nodes):
                return nodes
        return self._alike(parts)

    def _numbers(self, parts: list[Any]) -> list[str]:
        if not all(isinstance(each, Literal) and type(each.value) is int for each in parts):
            raise InvalidArgument("digits of round, and start and length of substring, are plain numbers")
        return [str(each.value) for each in parts]
