"""Find the declared streams: shipped ones, then those of the setting ``stream_declarations`` (modules, YAML files).

A module has ``STREAMS = [Stream(...), ...]``; a YAML file a list of streams under ``streams``, in which ``${env:NAME}``
is a variable of the environment.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import InvalidSettings, InvalidStream, StreamNotFound
from millrace.base.package import HAS_DEMO
from millrace.base.settings import Settings
from millrace.flows.declare.part import expanded
from millrace.flows.declare.stream import Stream

SHIPPED: Final = ("millrace.demo.streams",) if HAS_DEMO else ()
_SUFFIXES: Final = (".yaml", ".yml")


def declared_streams(settings: Settings, *, shipped: bool = True) -> dict[str, Stream]:
    """All streams by name, or without those `shipped`. Raises InvalidStream, which says where."""
    found: dict[str, Stream] = {}
    own: dict[str, Stream] = {}
    names = [name.strip() for name in settings.stream_declarations.split(",") if name.strip()]
    for place in (*SHIPPED, *names):
        for number, each in enumerate(_of_file(place) if place.endswith(_SUFFIXES) else _of_module(place)):
            stream = Stream.of(each, where=f"{place}, stream {number}{_named(each)}")
            if stream.name in found:
                raise InvalidStream(f"{place}: the name {stream.name!r} is taken by another stream")
            found[stream.name] = stream
            if place not in SHIPPED:
                own[stream.name] = stream
    return found if shipped else own


def declared_stream(settings: Settings, name: str) -> Stream:
    """The stream `name`. Raises StreamNotFound, which names those there are, and InvalidStream."""
    known = declared_streams(settings)
    if name not in known:
        raise StreamNotFound(f"no stream {name!r} is declared; there are {', '.join(sorted(known)) or 'none'}")
    return known[name]


def _named(value: object) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return f" ({name})" if isinstance(name, str) else ""


def _of_module(name: str) -> Iterable[Any]:
    try:
        found = importlib.import_module(name).STREAMS
    except (ImportError, AttributeError) as error:
        raise InvalidStream(f"stream_declarations: {name} cannot be had, or has no STREAMS: {error}") from error
    return list(found)


def _of_file(name: str) -> Iterable[Any]:
    import yaml

    try:
        value = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidStream(f"stream_declarations: {name} cannot be read: {error}") from error
    try:
        streams = expanded(value.get("streams")) if isinstance(value, dict) else None
    except InvalidSettings as error:
        raise InvalidStream(f"stream_declarations: {name}: {error}") from error
    if not isinstance(streams, list):
        raise InvalidStream(f"{name} has no list 'streams'")
    return streams
