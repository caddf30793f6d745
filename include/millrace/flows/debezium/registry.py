"""Avro messages whose schemas are in a registry (Confluent's API, also Apicurio's and Karapace's).

A message is a zero byte, the schema's number (four bytes, big-endian) and the value in Avro. A number's schema never
changes, so each is fetched once.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from millrace.base.errors import InvalidSettings, LogUnavailable
from millrace.flows.debezium.events import AvroValue
from millrace.flows.debezium.model import Registry
from millrace.flows.debezium.types import Column
from millrace.flows.declare.addresses import is_forbidden
from millrace.flows.documents import Refused

_SECONDS: Final = 10.0
_MAX_BYTES: Final = 8 << 20
_SCHEMAS: Final = 1024
_UNKNOWN_SECONDS: Final = 30.0
"""Seconds before an unknown schema number is requested again."""
_DEPTH: Final = 32
_HEADER: Final = 5
_PRIMITIVES: Final[Mapping[str, str]] = {
    "int": "int32",
    "long": "int64",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "string": "string",
    "enum": "string",
    "bytes": "bytes",
    "fixed": "bytes",
}


class _Schema(NamedTuple):
    parsed: Any
    column: Column


class SchemaRegistry:
    """Decodes messages. Not thread-safe."""

    def __init__(self, declared: Registry) -> None:
        """Raises InvalidSettings if the package fastavro is not installed."""
        try:
            import fastavro
        except ImportError:
            raise InvalidSettings(
                "debezium.registry needs the package fastavro: install millrace with the extra avro"
            ) from None
        self._avro: Any = fastavro
        self._declared = declared
        self._known: dict[int, _Schema] = {}
        self._unknown: dict[int, tuple[float, Refused]] = {}

    def decode(self, message: bytes, /) -> AvroValue:
        """Return the value of `message` with its schema.

        Raises Refused if the message is malformed or its schema unknown, LogUnavailable if the registry does not
        answer, InvalidSettings if it refuses.
        """
        if len(message) < _HEADER or message[0] != 0:
            raise Refused("NO_AVRO", "the value is not Avro of a schema registry: it has no schema number")
        number = int.from_bytes(message[1:_HEADER], "big")
        schema = self._schema(number)
        stream = io.BytesIO(message)
        stream.seek(_HEADER)
        try:
            value = self._avro.schemaless_reader(stream, schema.parsed, None)
        except Exception as error:  # fastavro raises the exceptions of its codecs
            words = f"not Avro of schema {number}: {type(error).__name__}: {error}"
            raise Refused("NO_AVRO", words[:500]) from None
        if stream.tell() != len(message):
            raise Refused("NO_AVRO", f"{len(message) - stream.tell()} bytes follow the value of schema {number}")
        return AvroValue(number, schema.column, value)

    def _schema(self, number: int) -> _Schema:
        found = self._known.get(number)
        if found is not None:
            return found
        until, refused = self._unknown.get(number, (0.0, None))
        if refused is not None and time.monotonic() < until:
            raise refused
        try:
            found = self._parsed(number, self._fetched(number))
        except Refused as error:
            if len(self._unknown) >= _SCHEMAS:
                self._unknown.clear()
            self._unknown[number] = (time.monotonic() + _UNKNOWN_SECONDS, error)
            raise
        if len(self._known) >= _SCHEMAS:
            self._known.clear()
        self._known[number] = found
        return found

    def _parsed(self, number: int, response: Mapping[str, Any]) -> _Schema:
        kind = response.get("schemaType", "AVRO")
        if kind != "AVRO":
            raise Refused("SCHEMA", f"schema {number} is {kind}: only Avro is decoded")
        if response.get("references"):
            raise Refused("SCHEMA", f"schema {number} refers to other schemas, which is not supported")
        try:
            plain = json.loads(response["schema"])
            column = column_of(plain)
            parsed = self._avro.parse_schema(_without_meanings(plain))
        except Refused:
            raise
        except Exception as error:  # fastavro has an exception for each kind of error
            raise Refused("SCHEMA", f"schema {number} is not Avro: {error}"[:500]) from None
        return _Schema(parsed, column)

    def _fetched(self, number: int) -> Mapping[str, Any]:
        place = urlsplit(self._declared.url)
        what = f"schema registry {place.scheme}://{place.netloc}"
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if self._declared.user:
            pair = f"{self._declared.user}:{self._declared.password.get_secret_value()}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        connection = _connection(place.scheme, place.netloc, self._declared.ca)
        try:
            connection.connect()
            if is_forbidden(str(connection.sock.getpeername()[0])):
                raise InvalidSettings(f"{what}: its name resolves to a forbidden address")
            connection.request("GET", f"{place.path.rstrip('/')}/schemas/ids/{number}", headers=headers)
            answer = connection.getresponse()
            body = answer.read(_MAX_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise LogUnavailable(f"{what}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if answer.status in (401, 403):
            raise InvalidSettings(f"{what} refuses {self._declared.user or 'a client without a user'!r}")
        try:
            response = json.loads(body) if len(body) <= _MAX_BYTES else None
        except ValueError:
            response = None
        if answer.status == 200 and isinstance(response, dict) and isinstance(response.get("schema"), str):
            return response
        if answer.status == 404 and isinstance(response, dict) and "error_code" in response:
            raise Refused("SCHEMA", f"{what} has no schema {number}")
        if answer.status == 429 or answer.status >= 500:
            raise LogUnavailable(f"{what} answers {answer.status}")
        raise InvalidSettings(
            f"{what} answers {answer.status}, which is not a schema registry's response: correct debezium.registry"
        )


def _connection(scheme: str, netloc: str, ca: str) -> Any:
    if scheme == "http":
        return http.client.HTTPConnection(netloc, timeout=_SECONDS)
    context = ssl.create_default_context(cadata=ca or None)
    return http.client.HTTPSConnection(netloc, timeout=_SECONDS, context=context)


def column_of(schema: Any) -> Column:
    """Return the column that a connector's Avro schema describes. Raises Refused."""
    return _column(schema, "", {}, "", 0)


def _column(schema: Any, field: str, named: dict[str, Any], space: str, depth: int) -> Column:
    if depth > _DEPTH:
        raise Refused("SCHEMA", f"a schema of more than {_DEPTH} levels")
    optional = False
    if isinstance(schema, list):
        rest = [each for each in schema if each != "null"]
        if len(rest) != 1:
            raise Refused("SCHEMA", f"{field}: a union of {len(rest)} types")
        optional, schema = len(rest) < len(schema), rest[0]
    if isinstance(schema, str):
        full = schema if "." in schema or not space else f"{space}.{schema}"
        schema = named.get(full, named.get(schema, {"type": schema}))
    kind = schema["type"]
    if isinstance(kind, dict | list):
        return _column(kind, field, named, space, depth + 1)
    name = schema.get("connect.name")
    if kind == "record":
        space = schema.get("namespace", space)
        named[f"{space}.{schema['name']}" if space else schema["name"]] = schema
        fields = tuple(_column(each["type"], each["name"], named, space, depth + 1) for each in schema["fields"])
        return Column("struct", field=field, name=name, optional=optional, fields=fields)
    if kind == "array":
        items = _column(schema["items"], "", named, space, depth + 1)
        return Column("array", field=field, name=name, optional=optional, items=items)
    if kind == "map":
        values = _column(schema["values"], "", named, space, depth + 1)
        return Column("map", field=field, name=name, optional=optional, values=values)
    if kind not in _PRIMITIVES:
        raise Refused("SCHEMA", f"{field}: the type {str(kind)[:80]}")
    parameters = schema.get("connect.parameters") or {}
    if schema.get("logicalType") == "decimal":
        parameters = {"scale": str(schema.get("scale", 0)), **parameters}
        name = name or "org.apache.kafka.connect.data.Decimal"
    return Column(_PRIMITIVES[kind], field=field, name=name, optional=optional, parameters=parameters or None)


def _without_meanings(schema: Any) -> Any:
    """Return the schema without logical types, so that values are decoded in their stored form, as in JSON."""
    if isinstance(schema, list):
        return [_without_meanings(each) for each in schema]
    if isinstance(schema, dict):
        return {
            name: _without_meanings(each) if name in ("type", "items", "values", "fields") else each
            for name, each in schema.items()
            if name != "logicalType"
        }
    return schema
