"""The base of all parts of a declaration, and the report of problems: one for each field, by the path a user wrote.

A part is frozen and refuses unknown fields. Each field has a description and bounds; the form in the user interface
is generated from their JSON schema.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from millrace.base.errors import InvalidSettings, PipelineInvalid
from millrace.flows.declare.addresses import check_address
from millrace.flows.declare.connections import named_connection, password_in_environment

_MISPLACED: Final = "misplaced"
KIND: Final = "kind"
"""The field that names the kind of a source, step or sink."""

MAX_PROBLEMS: Final = 100
"""The most problems in one response."""
_REFERENCE: Final = re.compile(r"\$\{(env|sealed):([^{}]+)\}")
_FIELD_CHARACTERS: Final = 300
_MESSAGE_CHARACTERS: Final = 2000
MAX_DEPTH: Final = 64
"""The most levels of nested values in a declaration."""


_WORDS: Final[Mapping[str, str]] = {
    "missing": "is required",
    "extra_forbidden": "is not a field here",
    "too_short": "takes at least {min_length}",
    "too_long": "takes at most {max_length}",
    "string_too_short": "takes at least {min_length} characters",
    "string_too_long": "takes at most {max_length} characters",
    "string_pattern_mismatch": "does not match {pattern}",
    "literal_error": "is one of {expected}",
    "union_tag_invalid": "its {discriminator} is one of {expected_tags}, not {tag}",
    "union_tag_not_found": "needs {discriminator}, which names its kind",
    "greater_than_equal": "is at least {ge}",
    "less_than_equal": "is at most {le}",
    "int_parsing": "is a whole number",
    "int_type": "is a whole number",
    "int_from_float": "is a whole number",
    "float_parsing": "is a number",
    "float_type": "is a number",
    "bool_parsing": "is true or false",
    "bool_type": "is true or false",
    "string_type": "is a text",
    "list_type": "is a list",
    "tuple_type": "is a list",
    "datetime_type": "is a moment such as 2026-01-01T00:00:00Z",
    "datetime_parsing": "is a moment such as 2026-01-01T00:00:00Z",
    "datetime_from_date_parsing": "is a moment such as 2026-01-01T00:00:00Z",
    "timezone_aware": "needs a zone, as in 2026-01-01T00:00:00Z",
}
"""Messages for pydantic's errors, in words of the declaration instead of pydantic's types."""


class Part(BaseModel):
    """A part of a declaration."""

    of_rows: ClassVar[frozenset[str]] = frozenset()
    """Fields for rows, which only a Spark query has."""
    of_documents: ClassVar[frozenset[str]] = frozenset()
    """Fields for documents, which only the range loop has."""
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Yield field and host of each server that it connects to; by default, of its field `host`."""
        host = getattr(self, "host", "")
        if isinstance(host, str) and host:
            yield "host", host.lower()

    def local_paths(self) -> Iterator[tuple[str, str]]:
        """Yield field and path of each local or object-store file or folder that it reads or writes."""
        yield from ()


def said(part: BaseModel, fields: Iterable[str]) -> list[str]:
    """Return those of `fields` whose value is not their default, in the order of the declaration."""
    return [
        name
        for name, field in type(part).model_fields.items()
        if name in fields and getattr(part, name) != field.get_default(call_default_factory=True)
    ]


def written(part: BaseModel, *, given: bool = False) -> dict[str, Any]:
    """Return a part as JSON, without secrets and defaults; with `given`, defaults that were given are included."""
    found: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        default = value == field.get_default(call_default_factory=True) and not (
            given and name in part.model_fields_set
        )
        if isinstance(value, SecretStr) or field.exclude or (default and name != KIND):
            continue
        found[field.alias or name] = _plain(value, given=given)
    return found


def _plain(value: Any, *, given: bool) -> Any:
    if isinstance(value, BaseModel):
        return written(value, given=given)
    if isinstance(value, Mapping):
        return {name: _plain(each, given=given) for name, each in value.items()}
    return [_plain(each, given=given) for each in value] if isinstance(value, list | tuple) else value


def with_secrets(value: Mapping[str, Any], secrets: Mapping[str, str]) -> dict[str, Any]:
    """Return the declaration `value` with `secrets` (by path) for the parts that have none."""
    whole = copy.deepcopy(dict(value)) if secrets else dict(value)
    for path, text in secrets.items():
        place: Any = whole
        *folders, last = path.split(".")
        for folder in folders:
            place = place.get(folder) if isinstance(place, dict) else None
        if isinstance(place, dict):  # else the declaration no longer has this part
            place.setdefault(last, text)
    return whole


def misplaced(path: str, message: str) -> PydanticCustomError:
    """Return an error of a whole model, for its field at `path`."""
    return PydanticCustomError(_MISPLACED, "{message}", {"path": path, "message": message})


def _topic(name: str) -> str:
    if name in (".", ".."):
        raise ValueError("is not a valid topic name")
    return name


TopicName: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$"), AfterValidator(_topic)
]
"""A Kafka topic's name, by Kafka's own rule."""


def _address(text: str) -> str:
    check_address(text)
    return text


Address: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}$", max_length=300),
    AfterValidator(_address),
]
"""``host:port``."""

Secret: TypeAlias = SecretStr
"""A secret. It prints as stars, and `Flow.to_json` omits it."""


class Problem(NamedTuple):
    """One thing that is wrong with a declaration."""

    field: str
    """The field's path, such as ``source.topics.0``; empty for the whole declaration."""
    message: str
    """What the field requires, in words."""
    kind: str
    """pydantic's name of the error (``missing``, ``extra_forbidden``, ...), or one of Millrace."""


def invalid(problems: Sequence[Problem], *, what: str = "the pipeline") -> PipelineInvalid:
    """Return the error that lists `problems`, the first hundred of them."""
    listed = [
        Problem(each.field[:_FIELD_CHARACTERS], each.message[:_MESSAGE_CHARACTERS], each.kind)
        for each in problems[:MAX_PROBLEMS]
    ]
    more = len(problems) - len(listed)
    return PipelineInvalid(
        f"{what}: "
        + "; ".join(f"{each.field or 'it'}: {each.message}" for each in listed)
        + (f"; and {more} more" if more else ""),
        problems=[each._asdict() for each in listed],
    )


def problems_of(error: ValidationError, value: Any) -> list[Problem]:
    """Return pydantic's errors in `value`, at the paths that the user wrote, without pydantic's union tags."""
    found = []
    for each in error.errors(include_url=False, include_input=False):
        said = _WORDS.get(each["type"])
        message = each["msg"].removeprefix("Value error, ") if said is None else said.format_map(each.get("ctx", {}))
        if each["type"] in ("too_short", "string_too_short") and each["ctx"]["min_length"] == 1:
            message = "is empty" + (", and takes at least one" if each["type"] == "too_short" else "")
        path = [*each["loc"], *([each["ctx"]["path"]] if each["type"] == _MISPLACED else [])]
        found.append(Problem(".".join(_untagged(path, value)), message, each["type"]))
    # pydantic counts only the valid items of a sequence, and so reports too few if one is wrong.
    return [
        each
        for each in found
        if each.kind != "too_short" or not any(other.field.startswith(f"{each.field}.") for other in found)
    ]


def _untagged(path: Sequence[int | str], value: Any) -> Iterator[str]:
    tagged = False
    for part in path:
        if isinstance(value, Mapping):
            if not tagged and part == value.get(KIND):
                tagged = True
                continue  # the tag of a union, which may also be the name of a field
            tagged, value = False, value.get(part)
        elif isinstance(value, BaseModel):
            if not tagged and part == getattr(value, KIND, None):
                tagged = True
                continue
            tagged, value = False, getattr(value, str(part), None)
        elif isinstance(value, Sequence) and not isinstance(value, str) and isinstance(part, int):
            value = value[part] if part < len(value) else None
        yield str(part)


def secrets_of(part: BaseModel) -> dict[str, str]:
    """Return the secrets of `part` in plain text, by path (``source.security.password``)."""
    found: dict[str, str] = {}
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, SecretStr):
            if value.get_secret_value():
                found[name] = value.get_secret_value()
        elif isinstance(value, BaseModel):
            found |= {f"{name}.{inner}": text for inner, text in secrets_of(value).items()}
    return found


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise ValueError if `value` is nested more than `left` levels deep, or contains text that cannot be encoded."""
    if left <= 0:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        check_text(value)
    if isinstance(value, Mapping):
        for name in value:
            check_depth(name, left)
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        check_depth(each, left - 1)


def check_text(text: str) -> None:
    """Raise ValueError for half a surrogate, which JSON can express (``"\\ud800"``) and UTF-8 cannot."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("has a text that is not valid Unicode (half a surrogate)") from None


def check_json(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise ValueError if `value` is not JSON (NaN is not), or nested deeper than MAX_DEPTH."""
    if left <= 0:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("has a name that is not a text")
        for each in value.values():
            check_json(each, left - 1)
    elif isinstance(value, list | tuple):
        for each in value:
            check_json(each, left - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("has an integer beyond 64 bits: write it as a text")
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(f"a value of type {type(value).__name__} is not JSON")


def check_certificates(text: str) -> None:
    """Raise ValueError unless `text` is empty or certificates in PEM."""
    import ssl

    try:
        if text:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError, TypeError):
        raise ValueError("is not certificates in PEM (-----BEGIN CERTIFICATE-----)") from None


def words(text: str, /, **bounds: Any) -> Any:
    """Return a field with its description and bounds."""
    return Field(description=text, **bounds)


def expanded(
    value: Any,
    *,
    env: Mapping[str, str] | None = None,
    unseal: Callable[[bytes], str] | None = None,
    connections: bool = True,
) -> Any:
    """Return a value of a declaration's file with its references resolved.

    ``${env:NAME}`` is a variable of the environment, ``${sealed:…}`` is decrypted by `unseal`, ``${connection:ID}`` is
    the password of an Airflow connection that the environment has, or stays as it is without `connections`. Raises
    InvalidSettings, and the errors of `unseal`.
    """
    if isinstance(value, str):
        if (connection := named_connection(value)) is not None:
            return password_in_environment(connection, env=env) if connections else value
        found = _REFERENCE.fullmatch(value)
        if found is None:
            return value
        known = os.environ if env is None else env
        if found[1] == "env":
            if found[2] not in known:
                raise InvalidSettings(f"{value}: the environment has no {found[2]}")
            return known[found[2]]
        if unseal is None:
            raise InvalidSettings(
                "a value is sealed (${sealed:…}), which only files of the service may contain: set it again"
            )
        return unseal(found[2].encode())
    if isinstance(value, dict):
        return {name: expanded(each, env=env, unseal=unseal, connections=connections) for name, each in value.items()}
    if isinstance(value, list):
        return [expanded(each, env=env, unseal=unseal, connections=connections) for each in value]
    return value
