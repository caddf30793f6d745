"""Trigger forms from parameter classes: each field becomes a field of the form, with its type, bounds and description.

    DAG(..., params=form(CompactionParams))

The class is the only description of a parameter: the form shows its JSON schema, Airflow validates against the same
schema, and the job validates again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from airflow.sdk import Param
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

_SUPPORTED: Final = (
    "type",
    "format",
    "enum",
    "const",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "items",
    "minItems",
    "maxItems",
    "uniqueItems",
    "properties",
    "required",
    "additionalProperties",
    "examples",
    "values_display",
    "title",
    "section",
)


def form(params: type[BaseModel], *, section: str | None = None, **defaults: Any) -> dict[str, Param]:
    """Return the Airflow params of a parameter class, in the order of its fields.

    `defaults` override the defaults of the class for this DAG. A field belongs to the section that its
    ``json_schema_extra={"section": ...}`` names, else to `section`. A field without a default must be filled in, so its
    DAG cannot have a schedule. Raises TypeError for a default of an unknown field.
    """
    unknown = defaults.keys() - params.model_fields.keys()
    if unknown:
        raise TypeError(f"{params.__name__} has no {', '.join(sorted(unknown))}")
    schema = params.model_json_schema()
    required = set(schema.get("required", ()))
    found: dict[str, Param] = {}
    for name, raw in schema.get("properties", {}).items():
        described = _flat(raw, schema.get("$defs", {}))
        if section is not None:
            described.setdefault("section", section)
        if "choices" in raw:
            described["examples"] = choices(raw["choices"])
        words = described.pop("description", None)
        if name in defaults:
            found[name] = Param(to_jsonable_python(defaults[name]), description=words, **described)
        elif name in required:
            found[name] = Param(description=words, **described)
        else:
            default = params.model_fields[name].get_default(call_default_factory=True, validated_data={})
            found[name] = Param(to_jsonable_python(default), description=words, **described)
    return found


def choices(what: str) -> list[str]:
    """Return the present choices as suggestions; values that are created later can be typed in.

    Empty if they cannot be determined.
    """
    from millrace.base.errors import MillraceError
    from millrace.catalog.sqlite_file import collection_names
    from millrace.operations.backfill.derived import derived_names
    from millrace_airflow.hooks import load_settings

    try:
        settings = load_settings()
    except MillraceError:
        return []
    if what == "derived tables":
        return derived_names(settings)
    return collection_names(settings.data_dir)


def values(params: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those params of a DAG run that `params` has, since several classes may share one form."""
    return {name: given[name] for name in params.model_fields if name in given}


def _flat(raw: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field's schema in the form that Airflow's form reads: no references, ``X | None`` as a list of types."""
    merged = dict(raw)
    reference = merged.pop("$ref", None)
    if reference is not None:
        merged = {**definitions[reference.rsplit("/", 1)[-1]], **merged}
    parts = merged.pop("allOf", [])
    for part in parts:
        merged = {**_flat(part, definitions), **merged}
    choices = [_flat(part, definitions) for part in merged.pop("anyOf", merged.pop("oneOf", []))]
    if choices:
        real = [choice for choice in choices if choice.get("type") != "null"]
        types = [kind for choice in choices for kind in _types(choice)]
        merged = {**(real[0] if len(real) == 1 else {}), **merged, "type": list(dict.fromkeys(types))}
        if "null" in types and "enum" in merged and None not in merged["enum"]:
            merged["enum"] = [*merged["enum"], None]
    if "const" in merged and "enum" not in merged:
        merged["enum"] = [merged.pop("const")]
    if "items" in merged and isinstance(merged["items"], dict):
        merged["items"] = _flat(merged["items"], definitions)
    supported = {key: merged[key] for key in _SUPPORTED if key in merged}
    return supported | ({"description": merged["description"]} if "description" in merged else {})


def _types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return list(kind) if isinstance(kind, list) else [kind]
