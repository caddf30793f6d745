"""The rules of a restored collection's schema: those it is created with, and those it gets after its rows.

A rule that every version of the schema had up to the restored time holds for every row. A later rule need not: adding a
rule does not check existing rows, but the restore writes them as new rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace.message.expression.rules import UntypedExpression
from millrace.message.expression.tree import Node, rename_field
from millrace.message.schema import CollectionSchema
from millrace.message.schema_changes import AddCheck, SchemaChange
from millrace.tables.read.plan import ReadPlan


def loadable_schema(plan: ReadPlan) -> tuple[CollectionSchema, list[SchemaChange]]:
    """Return the schema for the rows of `plan`, and the checks to add after them.

    A field that was declared as computed later becomes an ordinary field.
    """
    info = max(plan.vchannels.values(), key=lambda each: len(each.schemas))
    versions = [schema for _, schema in info.schemas[: info.version_at(plan.tick)]]
    return split_rules(plan.schema, versions)


def split_rules(
    schema: CollectionSchema, versions: Sequence[CollectionSchema]
) -> tuple[CollectionSchema, list[SchemaChange]]:
    """Return `schema` with the rules that all `versions` have, and the changes that add its other checks."""
    if not schema.has_row_rules:
        return schema, []
    checks = [{(each.name, _by_columns(each.condition, version)) for each in version.checks} for version in versions]
    computed = [
        {(f.stored_columns[0].name, _by_columns(f.computed, version)) for f in version.fields if f.computed is not None}
        for version in versions
    ]
    common = tuple(
        each
        for each in schema.checks
        if all((each.name, _by_columns(each.condition, schema)) in known for known in checks)
    )
    fields = tuple(
        field
        if field.computed is None
        or all((field.stored_columns[0].name, _by_columns(field.computed, schema)) in known for known in computed)
        else replace(field, computed=None)
        for field in schema.fields
    )
    later: list[SchemaChange] = [AddCheck(each.name, each.condition) for each in schema.checks if each not in common]
    return replace(schema, fields=fields, checks=common), later


def _by_columns(found: Node | UntypedExpression, schema: CollectionSchema) -> Node | UntypedExpression:
    """Return an expression with field names, which may change, replaced by the first column of each field."""
    if isinstance(found, Node):
        for place, field in enumerate(schema.fields):
            found = rename_field(found, (field.name,), f"\0{place}")
        for place, field in enumerate(schema.fields):
            found = rename_field(found, (f"\0{place}",), field.stored_columns[0].name)
    return found
