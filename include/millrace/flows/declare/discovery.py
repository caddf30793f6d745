"""Find the declared flows: the shipped ones, then those of the setting ``flow_declarations`` (modules, YAML files).

A YAML file has flows under ``flows``, and those of earlier builds under ``streams`` and ``pipelines``. ``${env:NAME}``
is a variable of the environment; ``${connection:ID}`` stays until the flow starts. A module has
``FLOWS = [Flow(...), ...]`` or ``STREAMS = [Stream(...), ...]``, or, with neither, flows as attributes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from millrace.base.errors import InvalidSettings, InvalidStream, StreamNotFound
from millrace.base.package import HAS_DEMO
from millrace.base.settings import Settings
from millrace.flows.declare.connections import named_connection
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.part import expanded
from millrace.flows.declare.spellings import NAME, Spelling
from millrace.flows.status import Host

SHIPPED: Final = ("millrace.demo.streams",) if HAS_DEMO else ()
_SUFFIXES: Final = (".yaml", ".yml")
_SECTIONS: Final[dict[str, Spelling]] = {"flows": "flow", "streams": "stream", "pipelines": "pipeline"}
"""Names of lists in a file (in capitals in a module), and the spelling of their entries."""


def declared_flows(settings: Settings, *, shipped: bool = True, host: Host | None = None) -> dict[str, Flow]:
    """Return the declared flows by name, of one `host` if given; without `shipped`, only the deployment's own.

    Raises InvalidStream, naming the place.
    """
    found: dict[str, Flow] = {}
    own: dict[str, Flow] = {}
    given = (*settings.flow_declarations.split(","), *settings.stream_declarations.split(","))
    for place in (*SHIPPED, *dict.fromkeys(name.strip() for name in given if name.strip())):
        for where, spelling, each in _of_file(place) if place.endswith(_SUFFIXES) else _of_module(place):
            written = f"{place}, {where}{_named(each, spelling)}"
            flow = Flow.of(each, where=written, spelling=spelling)
            if flow.host == "spark" and any(map(named_connection, flow.secrets().values())):
                raise InvalidStream(
                    f"{written}: a flow on Spark reads its declaration itself and cannot resolve ${{connection:…}}: use"
                    " ${env:NAME}"
                )
            if flow.name in found:
                raise InvalidStream(f"{place}: the name {flow.name!r} is taken by another flow")
            found[flow.name] = flow
            if place not in SHIPPED:
                own[flow.name] = flow
    chosen = found if shipped else own
    return {name: each for name, each in chosen.items() if host in (None, each.host)}


def declared_flow(settings: Settings, name: str, *, host: Host | None = None) -> Flow:
    """Return the declared flow `name`. Raises StreamNotFound, listing the declared flows, and InvalidStream."""
    known = declared_flows(settings, host=host)
    if name not in known:
        raise StreamNotFound(f"no flow {name!r} is declared; there are {', '.join(sorted(known)) or 'none'}")
    return known[name]


def _named(value: object, spelling: Spelling) -> str:
    name = value.get(NAME[spelling]) if isinstance(value, dict) else None
    return f" ({name})" if isinstance(name, str) else ""


def _of_module(name: str) -> Iterator[tuple[str, Spelling, Any]]:
    try:
        module = importlib.import_module(name)
    except (ImportError, ValidationError) as error:
        raise InvalidStream(f"flow_declarations: {name} cannot be imported: {error}") from error
    lists = {section: getattr(module, section.upper(), None) for section in _SECTIONS}
    if all(each is None for each in lists.values()):
        lists = {"flows": [each for each in vars(module).values() if isinstance(each, Flow)] or None}
    yield from _each(f"flow_declarations: {name}", {section.upper(): each for section, each in lists.items()})


def _of_file(name: str) -> Iterator[tuple[str, Spelling, Any]]:
    import yaml

    try:
        value = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidStream(f"flow_declarations: {name} cannot be read: {error}") from error
    try:
        lists = (
            {each: expanded(value.get(each), connections=False) for each in _SECTIONS}
            if isinstance(value, dict)
            else {}
        )
    except InvalidSettings as error:
        raise InvalidStream(f"flow_declarations: {name}: {error}") from error
    yield from _each(name, lists)


def _each(place: str, lists: dict[str, Any]) -> Iterator[tuple[str, Spelling, Any]]:
    """Yield each flow's place, its spelling, and its declaration. Raises InvalidStream if there is no list."""
    if all(each is None for each in lists.values()):
        raise InvalidStream(f"{place} has no list {next(iter(lists), 'flows')!r}")
    for section, each in lists.items():
        spelling = _SECTIONS[section.lower()]
        if each is not None and not isinstance(each, list | tuple):
            raise InvalidStream(f"{place} has no list {section!r}")
        for number, one in enumerate(each or ()):
            yield f"{spelling} {number}", spelling, one
