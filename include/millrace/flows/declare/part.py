"""What all parts of a declaration share, and how problems are reported: one for each field, by the path a user wrote.

A part is frozen and refuses unknown fields. Each field has a description and bounds, from which its JSON schema makes
the form.
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
"""The field by which parts of one place are told apart (source, step, sink)."""

MAX_PROBLEMS: Final = 100
"""That one answer lists."""
_REFERENCE: Final = re.compile(r"\$\{(env|sealed):([^{}]+)\}")
_FIELD_CHARACTERS: Final = 300
_MESSAGE_CHARACTERS: Final = 2000
MAX_DEPTH: Final = 64
"""Of nested values in a declaration."""


_WORDS: Final[Mapping[str, str]] = {
    "missing": "is required",
    "extra_forbidden": "is no field of this",
    "too_short": "takes at least {min_length}",
    "too_long": "takes at most {max_length}",
    "string_too_short": "takes at least {min_length} characters",
    "string_too_long": "takes at most {max_length} characters",
    "string_pattern_mismatch": "does not match {pattern}",
    "literal_error": "is one of {expected}",
    "union_tag_invalid": "its {discriminator} is one of {expected_tags}, not {tag}",
    "union_tag_not_found": "needs {discriminator}, which says what it is",
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
"""What a fault of pydantic's is to somebody who knows declarations, and none of its types."""


class Part(BaseModel):
    """A part of a declaration."""

    of_rows: ClassVar[frozenset[str]] = frozenset()
    """Fields that say something of rows, and so to a Spark query only."""
    of_documents: ClassVar[frozenset[str]] = frozenset()
    """Fields that say something of documents, and so to the range loop only."""
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Yield field and host of each server that it leads to: by default, of its field `host`."""
        host = getattr(self, "host", "")
        if isinstance(host, str) and host:
            yield "host", host.lower()

    def local_paths(self) -> Iterator[tuple[str, str]]:
        """Yield field and path of each file or folder, of the machine or an object store, that it reads or writes."""
        yield from ()


def said(part: BaseModel, fields: Iterable[str]) -> list[str]:
    """Return those of `fields` that have another value than their default, in the order of the declaration."""
    return [
        name
        for name, field in type(part).model_fields.items()
        if name in fields and getattr(part, name) != field.get_default(call_default_factory=True)
    ]


def written(part: BaseModel, *, given: bool = False) -> dict[str, Any]:
    """Return a part as JSON, without secrets and fields that have their default; with `given`, if they were given."""
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
    """Return the declaration `value` with `secrets` by path, where its parts have none."""
    whole = copy.deepcopy(dict(value)) if secrets else dict(value)
    for path, text in secrets.items():
        place: Any = whole
        *folders, last = path.split(".")
        for folder in folders:
            place = place.get(folder) if isinstance(place, dict) else None
        if isinstance(place, dict):  # else the declaration has no such part any more
            place.setdefault(last, text)
    return whole


def misplaced(path: str, message: str) -> PydanticCustomError:
    """Return the error of a whole model that says what is wrong at `path` in it."""
    return PydanticCustomError(_MISPLACED, "{message}", {"path": path, "message": message})


def _topic(name: str) -> str:
    if name in (".", ".."):
        raise ValueError("is no name of a topic")
    return name


TopicName: TypeAlias = Annotated[
    str, StringConstraints(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$"), AfterValidator(_topic)
]
"""Of a Kafka topic, by Kafka's own rule."""


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
"""Written once and never shown: it prints as stars, and `Flow.to_json` leaves it out."""


class Problem(NamedTuple):
    """One thing that is wrong with a declaration."""

    field: str
    """Where: ``source.topics.0``; "" for the whole."""
    message: str
    """What it takes, in words."""
    kind: str
    """pydantic's name of the fault (``missing``, ``extra_forbidden``, ...), or one of ours."""


def invalid(problems: Sequence[Problem], *, what: str = "the pipeline") -> PipelineInvalid:
    """The error that lists them; of many the first."""
    told = [
        Problem(each.field[:_FIELD_CHARACTERS], each.message[:_MESSAGE_CHARACTERS], each.kind)
        for each in problems[:MAX_PROBLEMS]
    ]
    more = len(problems) - len(told)
    return PipelineInvalid(
        f"{what}: "
        + "; ".join(f"{each.field or 'it'}: {each.message}" for each in told)
        + (f"; and {more} more" if more else ""),
        problems=[each._asdict() for each in told],
    )


def problems_of(error: ValidationError, value: Any) -> list[Problem]:
    """Return pydantic's errors in `value`, at the paths that its writer knows: without pydantic's tags for unions."""
    found = []
    for each in error.errors(include_url=False, include_input=False):
        said = _WORDS.get(each["type"])
        message = each["msg"].removeprefix("Value error, ") if said is None else said.format_map(each.get("ctx", {}))
        if each["type"] in ("too_short", "string_too_short") and each["ctx"]["min_length"] == 1:
            message = "is empty" + (", and takes at least one" if each["type"] == "too_short" else "")
        path = [*each["loc"], *([each["ctx"]["path"]] if each["type"] == _MISPLACED else [])]
        found.append(Problem(".".join(_told(path, value)), message, each["type"]))
    # pydantic counts the items of a sequence that are right, and finds too few where one is wrong.
    return [
        each
        for each in found
        if each.kind != "too_short" or not any(other.field.startswith(f"{each.field}.") for other in found)
    ]


def _told(path: Sequence[int | str], value: Any) -> Iterator[str]:
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
    """Every secret of `part` in plain, by its path (``source.security.password``)."""
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
    """Raises ValueError for half a surrogate, which JSON can say (``"\\ud800"``) and UTF-8 cannot."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("has a text that is no Unicode (half a surrogate)") from None


def check_json(value: Any, left: int = MAX_DEPTH) -> None:
    """Raises ValueError where `value` is no JSON (NaN is none), or nested deeper than MAX_DEPTH."""
    if left <= 0:
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ValueError("has a name that is no text")
        for each in value.values():
            check_json(each, left - 1)
    elif isinstance(value, list | tuple):
        for each in value:
            check_json(each, left - 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("has an integer beyond 64 bits: write it as a text")
    elif not (value is None or isinstance(value, str | int | float)):
        raise ValueError(f"a value of type {type(value).__name__} is no JSON")


def check_certificates(text: str) -> None:
    """Raises ValueError unless `text` is certificates in PEM. An empty text is none, and allowed."""
    import ssl

    try:
        if text:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError, TypeError):
        raise ValueError("is not certificates in PEM (-----BEGIN CERTIFICATE-----)") from None


def words(text: str, /, **bounds: Any) -> Any:
    """A field's description with its bounds."""
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
                "a value is sealed (${sealed:…}), which files of the service alone may have: give it anew"
            )
        return unseal(found[2].encode())
    if isinstance(value, dict):
        return {name: expanded(each, env=env, unseal=unseal, connections=connections) for name, each in value.items()}
    if isinstance(value, list):
        return [expanded(each, env=env, unseal=unseal, connections=connections) for each in value]
    return value
