"""Event types: names and schema versions of an aggregate's events, their JSON form, and upcasters from old versions.

    account = EventTypes()

    @account.register(version=2)
    @dataclass
    class Deposited:
        amount: int
        currency: str

    @account.upcaster("Deposited", 1)
    def _with_currency(data):
        return data | {"currency": "EUR"}

A type is a dataclass, a pydantic model, a TypedDict or a ``msgspec.Struct``. Its name and version are stored with each
event, so a class may be renamed if its registered name stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from uuid import UUID

import pydantic
import pydantic_core

from millrace.base.errors import EventUndecodable, InvalidArgument
from millrace.base.extras import import_optional

ERASED: Final = "$erased"
"""The type of the event that replaces all earlier events of an aggregate, which were erased."""
MAX_TYPE_VERSION: Final = (1 << 31) - 1

T = TypeVar("T")
Upcaster: TypeAlias = Callable[[dict[str, Any]], Mapping[str, Any]]
"""Makes the data of the next version, as JSON values, from that of one version."""


class _Codec(Protocol):
    """The JSON form of one class."""

    def encode(self, value: Any) -> str: ...

    def decode(self, text: str) -> Any: ...


class _PydanticCodec:
    def __init__(self, kind: Any) -> None:
        self._adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)

    def encode(self, value: Any) -> str:
        return self._adapter.dump_json(value).decode()

    def decode(self, text: str) -> Any:
        return self._adapter.validate_json(text)


class _StructCodec:
    def __init__(self, kind: Any) -> None:
        msgspec = import_optional("msgspec")
        self._decoder = msgspec.json.Decoder(kind)
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder(order="deterministic").encode

    def encode(self, value: Any) -> str:
        return self._encode(value).decode()

    def decode(self, text: str) -> Any:
        return self._decoder.decode(text)


def is_struct(kind: Any) -> bool:
    """Return whether a class is a ``msgspec.Struct``. Does not import msgspec."""
    return hasattr(kind, "__struct_fields__")


def codec_of(kind: Any) -> _Codec:
    """Return the JSON form of a class. Raises InvalidArgument if it has none, InvalidSettings without msgspec."""
    try:
        return _StructCodec(kind) if is_struct(kind) else _PydanticCodec(kind)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise InvalidArgument(
            f"{kind!r} is no dataclass, pydantic model, TypedDict or msgspec.Struct: {error}"
        ) from None


@dataclass(frozen=True)
class EventType:
    """A registered type: its name, its newest schema version, its class."""

    name: str
    version: int
    kind: Any

    @cached_property
    def codec(self) -> _Codec:
        """The JSON form of the newest version."""
        return codec_of(self.kind)


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event as it was stored, decoded to the newest version of its type."""

    key: str
    version: int
    """The aggregate's version once the event has happened: 1 for its first."""
    type: str
    data: Any
    """The event; None for an erasure."""
    command: UUID
    """The id of the command that appended it."""
    at: datetime
    """When the writer says that it happened."""
    metadata: Mapping[str, Any]


class EventTypes:
    """The event types of an aggregate. Register all of them before the first use."""

    def __init__(self) -> None:
        self._by_name: dict[str, EventType] = {}
        self._by_class: dict[Any, EventType] = {}
        self._upcasters: dict[tuple[str, int], Upcaster] = {}

    def register(self, *, name: str | None = None, version: int = 1) -> Callable[[type[T]], type[T]]:
        """Register the decorated class as an event type. `name` is stored with each event (default: the class's).

        Raises InvalidArgument for a name that is taken, a version below 1, or a class without a JSON form.
        """

        def add(kind: type[T]) -> type[T]:
            chosen = kind.__name__ if name is None else name
            if not chosen or chosen.startswith("$"):
                raise InvalidArgument(f"{chosen!r} is no name of an event type: names starting with $ are reserved")
            if chosen in self._by_name:
                raise InvalidArgument(f"an event type {chosen!r} is registered already: give it another name")
            if kind in self._by_class:
                raise InvalidArgument(f"{kind.__name__} is registered already, as {self._by_class[kind].name!r}")
            if not 1 <= version <= MAX_TYPE_VERSION:
                raise InvalidArgument(f"the version of {chosen!r} is 1 to {MAX_TYPE_VERSION}, not {version}")
            made = EventType(chosen, version, kind)
            _ = made.codec
            self._by_name[chosen] = self._by_class[kind] = made
            return kind

        return add

    def upcaster(self, name: str, version: int) -> Callable[[Upcaster], Upcaster]:
        """Register the decorated function, which makes version `version` + 1 of an event's data from `version`.

        The data is what JSON gives: dicts, lists, strings, numbers. Raises InvalidArgument.
        """

        def add(function: Upcaster) -> Upcaster:
            kind = self._by_name.get(name)
            if kind is None:
                raise InvalidArgument(f"no event type {name!r} is registered: register it before its upcasters")
            if not 1 <= version < kind.version:
                raise InvalidArgument(f"{name!r} has version {kind.version}: there is nothing to upcast from {version}")
            if (name, version) in self._upcasters:
                raise InvalidArgument(f"{name!r} has an upcaster from version {version} already")
            self._upcasters[name, version] = function
            return function

        return add

    def types(self) -> list[EventType]:
        """Return the registered types by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def upcasters(self) -> list[tuple[str, int, Upcaster]]:
        """Return the upcasters, by type and version."""
        return [(*key, self._upcasters[key]) for key in sorted(self._upcasters)]

    def encode(self, event: Any) -> tuple[str, int, str]:
        """Return an event's type name, version and JSON.

        Raises InvalidArgument if its class is not registered, or if its JSON does not give an event of the class again:
        once it were appended, nobody could load the aggregate.
        """
        kind = self._by_class.get(type(event))
        if kind is None:
            known = ", ".join(each.name for each in self.types()) or "none"
            raise InvalidArgument(f"{type(event).__name__} is no registered event type: there are {known}")
        try:
            text = kind.codec.encode(event)
        except (pydantic_core.PydanticSerializationError, TypeError, ValueError) as error:
            raise InvalidArgument(f"an event {kind.name!r} has no JSON form: {error}") from None
        try:
            kind.codec.decode(text)
        except Exception as error:  # a validator is the user's code and may raise anything
            raise InvalidArgument(
                f"an event {kind.name!r} cannot be read from its JSON form: give its fields values of their types"
                f" ({error})"
            ) from None
        return kind.name, kind.version, text

    def decode(self, name: str, version: int, text: str) -> Any:
        """Return the event of stored JSON, upcast to the newest version. Raises EventUndecodable."""
        kind = self._by_name.get(name)
        if kind is None:
            raise EventUndecodable(f"no event type {name!r} is registered: register it, or deploy the newer program")
        try:
            if version == kind.version:
                return kind.codec.decode(text)
            return kind.codec.decode(self._upcast(kind, version, text))
        except EventUndecodable:
            raise
        except Exception as error:
            # An upcaster is the user's code and may raise anything.
            raise EventUndecodable(
                f"version {version} of event {name!r} does not give a {kind.kind.__name__}: {error}"
            ) from error

    def _upcast(self, kind: EventType, version: int, text: str) -> str:
        if version > kind.version:
            raise EventUndecodable(
                f"event {kind.name!r} has version {version}, this program knows {kind.version}: deploy the newer one"
            )
        data = pydantic_core.from_json(text)
        for step in range(version, kind.version):
            function = self._upcasters.get((kind.name, step))
            if function is None:
                raise EventUndecodable(
                    f"event {kind.name!r} has version {version}, and there is no upcaster from {step} to {step + 1}"
                )
            data = function(data)
        return pydantic_core.to_json(data).decode()
