"""The steps of a transform of documents. Each step is data; ``flows/transform`` compiles it.

Paths are those of `paths.py`. A document on which a step fails goes to the error topic, with the step's name and the
reason.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from millrace.flows.declare.expressions import Expression, Schema
from millrace.flows.declare.part import Part, check_json, words
from millrace.flows.declare.paths import FieldPath, TemplateText, split

CastType = Literal["string", "int", "float", "bool", "timestamp"]
"""``timestamp``: ISO 8601, or seconds, milliseconds or microseconds since 1970 by magnitude, to ISO 8601 in UTC."""

MAX_FIELDS = 256


def _value(value: Any) -> Any:
    check_json(value)
    return value


JsonValue: TypeAlias = Annotated[Any, AfterValidator(_value)]


class Step(Part):
    """A step of a pipeline."""

    name: str = words(
        "the step's name in errors, samples and metrics; empty: its kind and index", default="", max_length=100
    )


class Rename(Step):
    """Move values from one path to another. A missing path stays missing; a value at the new path is replaced."""

    kind: Literal["rename"] = "rename"
    fields: dict[FieldPath, FieldPath] = words("old path: new path", min_length=1, max_length=MAX_FIELDS)

    @model_validator(mode="after")
    def _apart(self) -> Rename:
        new = [split(each) for each in self.fields.values()]
        if len(set(new)) < len(new):
            raise ValueError("fields: two values cannot move to one path")
        return self


class Cast(Step):
    """Convert values to another type. Null stays null, and a missing value stays missing."""

    kind: Literal["cast"] = "cast"
    fields: dict[FieldPath, CastType] = words("path: type", min_length=1, max_length=MAX_FIELDS)


class Drop(Step):
    """Remove values."""

    kind: Literal["drop"] = "drop"
    fields: tuple[FieldPath, ...] = words("paths", min_length=1, max_length=MAX_FIELDS)


class Constant(Step):
    """Set the same value in every document."""

    kind: Literal["constant"] = "constant"
    fields: dict[FieldPath, JsonValue] = words("path: any JSON value", min_length=1, max_length=MAX_FIELDS)


class TemplateId(Step):
    """Build the document's id from its values. A missing, null or non-scalar value is an error, never ``None``."""

    kind: Literal["template_id"] = "template_id"
    template: TemplateText = words("such as {carrier}-{flight}")
    into: FieldPath | None = words("a path that receives a copy of the id", default=None)


class Lookup(Step):
    """Add values of the collection's row whose key is in the document."""

    kind: Literal["lookup"] = "lookup"
    collection: str = words("its name", min_length=1, max_length=255)
    key: FieldPath = words("the path of the key in the document")
    take: tuple[str, ...] = words("columns of the row; empty: all", default=(), max_length=MAX_FIELDS)
    into: FieldPath = words("the path that receives the row, as an object")
    missing: Literal["error", "null", "skip"] = words(
        "if there is no such row: an error, null, or nothing", default="error"
    )
    refresh_seconds: float = words("the greatest age of cached rows", default=30.0, ge=0.1, le=86_400)


class Flatten(Step):
    """Turn nested objects into names with a separator: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""

    kind: Literal["flatten"] = "flatten"
    separator: str = words("between names", default=".", min_length=1, max_length=8)
    depth: int = words("the number of levels; deeper objects stay objects", default=32, ge=1, le=64)
    lists: Literal["keep", "index"] = words("keep lists, or turn their indexes into names", default="keep")


class Filter(Step):
    """Leave out documents for which the expression is false. They are counted as filtered."""

    kind: Literal["filter"] = "filter"
    keep: Expression = words("CEL over doc, true or false")


class Compute(Step):
    """Set values by expressions over the document as it was before the step."""

    kind: Literal["compute"] = "compute"
    fields: dict[FieldPath, Expression] = words("path: CEL over doc", min_length=1, max_length=MAX_FIELDS)


class Validate(Step):
    """Require the document to be valid by a JSON Schema."""

    kind: Literal["json_schema"] = "json_schema"
    schema_: Schema = Field(
        alias="schema", description="JSON Schema (its $schema says the draft; 2020-12 without); no remote references"
    )
    formats: bool = words("whether formats (date-time, email, ...) are checked", default=True)


AnyStep: TypeAlias = Annotated[
    Rename | Cast | Drop | Constant | TemplateId | Lookup | Flatten | Filter | Compute | Validate,
    Field(discriminator="kind"),
]
