"""Rules of a schema for its rows: checks, computed values and defaults, as trees over the schema's fields.

:func:`bind_rules` types every expression over the schema's fields, or raises InvalidArgument with the invalid one. The
same fields and expressions always give the same result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from millrace.base.errors import InvalidArgument, Malformed
from millrace.message.expression.tree import (
    FieldTypes,
    Node,
    literal_text,
    literal_value,
    make_node,
    node_from_json,
    node_to_json,
    references,
    rename_field,
    retype,
    value_kind,
)
from millrace.message.field_types import FieldType, check_name

if TYPE_CHECKING:
    from millrace.message.schema import CollectionSchema, FieldSpec

MAX_CHECKS: Final = 100
MAX_OPERATIONS: Final = 2_000
"""Maximum operations in all checks and computed values of a schema."""

_RANGES: Final = {"int8": 1 << 7, "int16": 1 << 15, "int32": 1 << 31}


@dataclass(frozen=True, slots=True)
class UntypedExpression:
    """An expression without types: as a user wrote it, or as JSON."""

    text: str
    is_json: bool = False

    @classmethod
    def of_json(cls, value: object) -> UntypedExpression:
        return cls(json.dumps(value), True)


@dataclass(frozen=True, slots=True)
class CheckConstraint:
    """A condition that no row of the collection may violate; null passes, as in SQL."""

    name: str
    condition: Node | UntypedExpression

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "condition": expression_json(self.condition)}

    @classmethod
    def from_json(cls, value: object) -> CheckConstraint:
        """Invert :meth:`to_json`, without typing the condition. Raises Malformed."""
        if not isinstance(value, dict) or set(value) != {"name", "condition"} or not isinstance(value["name"], str):
            raise Malformed("a check is an object with a name and a condition")
        return cls(value["name"], UntypedExpression.of_json(value["condition"]))


def expression_json(found: Node | UntypedExpression) -> Any:
    """Return an expression's JSON. Raises InvalidArgument for text that is not typed yet."""
    if isinstance(found, Node):
        return node_to_json(found)
    if not found.is_json:
        raise InvalidArgument(f"{found.text!r:.80} is bound to no schema yet")
    return json.loads(found.text)


def bind_rules(
    fields: tuple[FieldSpec, ...], checks: Sequence[CheckConstraint]
) -> tuple[tuple[FieldSpec, ...], tuple[CheckConstraint, ...]]:
    """Type every expression in `fields` and `checks` of one schema.

    Raises InvalidArgument with the name of the check or field.
    """
    known = {field.name: field.parsed_type for field in fields}
    stored = {field.name: field.parsed_type for field in fields if field.computed is None}
    typed = tuple(
        field if field.computed is None else replace(field, computed=_computed(field.computed, field, stored))
        for field in fields
    )
    found = tuple(CheckConstraint(each.name, _condition(each, known)) for each in checks)
    if len(found) > MAX_CHECKS or len({each.name for each in found}) < len(found):
        raise InvalidArgument(f"a schema has at most {MAX_CHECKS} checks, none of a name twice")
    trees = [*(each.condition for each in found), *(field.computed for field in typed if field.computed is not None)]
    if sum(len(expression_json(each)) for each in trees) > MAX_OPERATIONS:
        raise InvalidArgument(
            f"the checks and computed values of a schema have at most {MAX_OPERATIONS} operations in sum"
        )
    return typed, found


def parse_default(value: Any, name: str, kind: FieldType) -> Node:
    """Return a field's default from a value, an untyped expression or a tree. Raises InvalidArgument."""
    try:
        if isinstance(value, UntypedExpression):
            node = node_from_json(expression_json(value), {})
        elif isinstance(value, Node):
            node = value
        else:
            from millrace.message.expression.binding import bind_default

            node = bind_default(value, kind)
        return _checked_default(node, kind)
    except (InvalidArgument, Malformed) as error:
        raise InvalidArgument(f"the default of field {name!r}: {error}") from None


def widen_default(found: Any, kind: FieldType) -> Any:
    """Convert a field's default to a wider type."""
    if not isinstance(found, Node) or found.kind == value_kind(kind):
        return found
    if found.op != "literal":
        now = make_node("now", (), (), {})
        return now if kind.kind == "timestamp" else make_node("cast", (now,), (kind.text,), {})
    text = found.params[1]
    if kind.kind == "decimal":
        text = literal_text(kind.text, literal_value(kind.text, text))
    else:
        text += "T00:00:00.000000"
    return make_node("literal", (), (kind.text, text), {})


def describe_rules(schema: CollectionSchema) -> dict[str, str]:
    """Return a schema's rules as text, by ``default <field>``, ``computed <field>`` and ``check <name>``."""
    from millrace.message.expression.formatter import format_expression

    rules: dict[str, Any] = {}
    for field in schema.fields:
        rules |= {
            f"{what} {field.name}": rule for what, rule in (("default", field.default), ("computed", field.computed))
        }
    rules |= {f"check {each.name}": each.condition for each in schema.checks}
    return {name: format_expression(rule) for name, rule in rules.items() if isinstance(rule, Node)}


def require_field_unused(path: tuple[str, ...], schema: CollectionSchema) -> None:
    """Check that no check or computed field uses a field, or one inside it. Raises InvalidArgument."""
    shown = ".".join(path)
    for each in schema.checks:
        if isinstance(each.condition, Node) and references(each.condition, path):
            raise InvalidArgument(f"the check {each.name!r} is of field {shown!r}: drop the check first")
    for field in schema.fields:
        if isinstance(field.computed, Node) and references(field.computed, path):
            raise InvalidArgument(f"field {field.name!r} is computed of {shown!r}: drop it first")


def rename_in_rules(
    fields: tuple[FieldSpec, ...], checks: tuple[CheckConstraint, ...], path: tuple[str, ...], to: str
) -> tuple[tuple[FieldSpec, ...], tuple[CheckConstraint, ...]]:
    """Return fields and checks whose expressions use the new name of a field, or of one inside it."""
    return (
        tuple(
            replace(each, computed=rename_field(each.computed, path, to)) if isinstance(each.computed, Node) else each
            for each in fields
        ),
        tuple(
            CheckConstraint(
                each.name,
                rename_field(each.condition, path, to) if isinstance(each.condition, Node) else each.condition,
            )
            for each in checks
        ),
    )


def _checked_default(node: Node, kind: FieldType) -> Node:
    stamped = node.op == "now" or (node.op == "cast" and node.args[0].op == "now")
    if not stamped and node.op != "literal":
        raise InvalidArgument("a default is a value, or now()")
    if node.kind != value_kind(kind) or kind.kind in ("uuid", "json", "binary") or kind.is_nested:
        raise InvalidArgument(f"a field of type {kind.text} has no default of {node.kind}")
    if kind.kind in _RANGES and not -_RANGES[kind.kind] <= literal_value(*node.params) < _RANGES[kind.kind]:
        raise InvalidArgument(f"{node.params[1]} is no {kind.text}")
    return node


def _condition(check: CheckConstraint, fields: FieldTypes) -> Node:
    check_name(check.name, "a check")
    try:
        node = _typed(check.condition, fields, None)
        if node.kind != "bool":
            raise InvalidArgument(f"it is {node.kind}, and a condition is true or false")
        return node
    except (InvalidArgument, Malformed) as error:
        raise InvalidArgument(f"check {check.name!r}: {error}") from None


def _computed(found: Any, field: FieldSpec, fields: FieldTypes) -> Node:
    try:
        node = _typed(found, fields, field.parsed_type)
        if node.kind != value_kind(field.parsed_type):
            raise InvalidArgument(f"it is {node.kind}, and the field {field.type}")
        return node
    except (InvalidArgument, Malformed) as error:
        raise InvalidArgument(f"the computed field {field.name!r}, of fields that are not computed: {error}") from None


def _typed(found: Node | UntypedExpression, fields: FieldTypes, kind: FieldType | None) -> Node:
    if isinstance(found, Node):
        node = retype(found, fields)
    elif found.is_json:
        node = node_from_json(expression_json(found), fields)
    else:
        from millrace.message.expression import binding

        node = (
            binding.bind_condition(found.text, fields)
            if kind is None
            else binding.bind_computed(found.text, fields, kind)
        )
    if _reads_clock(node):
        raise InvalidArgument("now() is a default alone")
    return node


def _reads_clock(node: Node) -> bool:
    return node.op == "now" or any(map(_reads_clock, node.args))
