"""The spellings of declarations of earlier builds, as plain values: streams, and pipelines of reference document 004.

Each spelling is the same flow (`flow.py`), on the same host: :func:`plain` returns a declaration in the form of flows,
and :func:`as_written` returns the path of a problem as the user wrote it.

The fields of a stream's source (`collection`, or `kafka` and `topics`) and sink (`collection`, `delta`, `kafka`,
`opensearch`, `function`) implied their kind. :func:`source` and :func:`sink` add the `kind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

Spelling = Literal["flow", "stream", "pipeline"]
VERSION: Final = 1
"""The version of the form of pipelines. A new field is optional, so that older declarations keep their meaning."""
NAME: Final[Mapping[Spelling, str]] = {"flow": "name", "stream": "name", "pipeline": "id"}
"""The field with a flow's name, by spelling."""
_STREAM: Final = {"transform": "function", "sql": "sql", "tables": "tables", "operator": "operator",
                  "output_mode": "output_mode"}  # fmt: skip
"""Fields of a stream that are fields of a flow's transform."""
_STREAM_NAMES: Final = {"words": "description"}
_PIPELINE_NAMES: Final = {"id": "name", "name": "title"}
SINKS: Final = ("collection", "delta", "kafka", "opensearch", "function")
_CLUSTER: Final = ("bootstrap", "security", "socket_timeout_ms")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "mode": "append", "partition": None, "partition_by": None, "dead_letters": None, "create": False,
    "merge_schema": False, "topic": None, "key": None,
}  # fmt: skip
"""Fields of a stream's sink besides the one that implies its kind."""
_FIELDS: Final[Mapping[str, str]] = {"path": "delta", "table": "delta", "bootstrap": "kafka", "hosts": "opensearch"}
"""Fields that imply the kind of a sink without `kind`, such as one that is shown without its defaults."""
_OF_KIND: Final[Mapping[str, tuple[str, ...]]] = {
    "collection": ("mode", "partition", "partition_by", "dead_letters", "create", "key"),
    "delta": ("merge_schema",),
    "kafka": ("topic", "key", "dead_letters"),
    "opensearch": ("key", "dead_letters"),
    "function": (),
}


def source(value: Any) -> Any:
    """Return a stream's source with its `kind`. A value that has one, or is not a mapping, is returned unchanged."""
    if isinstance(value, str):
        return {"kind": "collection", "collection": value}
    if not isinstance(value, dict) or "kind" in value:
        return value
    if "kafka" in value:
        return {"kind": "kafka", **_brokers(value["kafka"]), **{n: v for n, v in value.items() if n != "kafka"}}
    return {"kind": "kafka" if "topics" in value else "collection", **value}


def sink(value: Any) -> Any:
    """Return a stream's sink with its `kind`. Raises ValueError if its fields imply no kind, or several.

    A value that has a `kind`, or is not a mapping, is returned unchanged.
    """
    if isinstance(value, str):
        return {"kind": "collection", "collection": value}
    if not isinstance(value, dict) or "kind" in value:
        return value
    for field, kind in _FIELDS.items():
        if field in value:
            return {"kind": kind, **value}
    given = [name for name in SINKS if value.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"a sink is one of {', '.join(SINKS)}; this has {', '.join(given) or 'none'}")
    kind = given[0]
    if (kind == "kafka" and value.get("topic") is None) or (kind != "kafka" and value.get("topic") is not None):
        raise ValueError("a Kafka sink needs its servers (kafka) and a topic")
    odd = sorted(
        name
        for name, default in _DEFAULTS.items()
        if name not in _OF_KIND[kind] and value.get(name, default) != default
    )
    if odd:
        raise ValueError(f"{odd[0]!r} is not a field of a {kind} sink")
    if kind == "opensearch" and not value.get("key"):
        raise ValueError("an OpenSearch sink takes ids from columns: set 'key'")
    rest = {name: each for name, each in value.items() if name not in SINKS}
    rest = {name: each for name, each in rest.items() if name in _OF_KIND[kind] or name not in _DEFAULTS}
    of = value[kind]
    if kind == "kafka":
        return {"kind": kind, "compression": "none", **_brokers(of, servers=True), **rest}
    if kind == "opensearch":
        # Python code may pass the model of a sink itself.
        return {"kind": kind, **(of if isinstance(of, dict) else _fields(of)), **rest}
    return {"kind": kind, "path" if kind == "delta" else kind: of, **rest}


def _brokers(value: Any, *, servers: bool = False) -> dict[str, Any]:
    """Return the brokers' addresses as a cluster without TLS and SASL; with `servers`, also as the user wrote them."""
    if not isinstance(value, str):
        return value if isinstance(value, dict) else _fields(value)
    bootstrap = [each.strip() for each in value.split(",")]
    spelled = {"servers": value} if servers and ",".join(bootstrap) != value else {}
    return {"bootstrap": bootstrap, **spelled}


def _fields(part: Any) -> dict[str, Any]:
    """Return the fields of a model that were given."""
    found = {name: getattr(part, name) for name in getattr(part, "model_fields_set", ())}
    if not found:
        raise ValueError(f"{part!r} is not a mapping")
    return found


def stream_sink(sink: Any) -> dict[str, Any]:
    """Return a sink of rows in the spelling of streams, without defaults.

    Fingerprints of streams are computed from it.
    """
    kind = sink.kind
    if kind == "kafka":
        servers: Any = sink.servers or ",".join(sink.bootstrap)
        named = {"kafka": servers, "topic": sink.topic}
    elif kind == "opensearch":
        named = {kind: sink.model_dump(mode="json", exclude_defaults=True, exclude={"key", "dead_letters"})}
    else:
        named = {kind: sink.path if kind == "delta" else getattr(sink, kind)}
        if kind == "delta" and sink.table is not None:
            named = {"table": sink.table}
    more = {name: getattr(sink, name) for name in _OF_KIND[kind] if name != "topic"}
    return {**named, **{name: each for name, each in more.items() if each != _DEFAULTS[name]}}


def sink_identity(sink: Any) -> dict[str, Any]:
    """Return the fields that decide where a stream's rows go. For OpenSearch, the index, whatever its addresses."""
    found = {**dict.fromkeys(SINKS), **_DEFAULTS, **stream_sink(sink)}
    if sink.kind == "opensearch":
        found["opensearch"] = sink.index_base
    else:
        del found["opensearch"]
    if not found["create"]:
        del found["create"]
    return found


class Misspelled(ValueError):
    """A part that no spelling has. `field` is its path."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def spelling_of(value: Mapping[str, Any]) -> Spelling:
    """Return the spelling of a declaration in a file of its own: a pipeline has an `id`, a flow a `name`."""
    return "pipeline" if "id" in value or "steps" in value else "flow"


def plain(value: Mapping[str, Any], spelling: Spelling) -> dict[str, Any]:
    """Return a declaration in the form of flows. Raises Misspelled. A field that `spelling` lacks stays as it is."""
    if spelling == "flow":
        return dict(value)
    found = dict(value)
    if spelling == "pipeline":
        for name in ("transform", "host", "title", "schedule"):
            if name in value:
                raise Misspelled(name, "is not a field here")
        form = found.pop("version", VERSION)
        if form != VERSION or isinstance(form, bool):
            raise Misspelled("version", f"is {VERSION}, the version of this form")
        steps = {"steps": found.pop("steps")} if "steps" in found else {}
        found = {_PIPELINE_NAMES.get(name, name): each for name, each in found.items()}
        return {**found, "transform": steps, "host": "range"}
    if "host" in value:
        raise Misspelled("host", "is not a field here: a stream runs on Spark")
    transform = {ours: value[name] for name, ours in _STREAM.items() if name in value}
    found = {_STREAM_NAMES.get(name, name): each for name, each in found.items() if name not in _STREAM}
    for name, spelled in (("source", source), ("sink", sink), ("late", sink)):
        if found.get(name) is not None:
            try:
                found[name] = spelled(found[name])
            except ValueError as error:
                raise Misspelled(name, str(error)) from None
    return {**found, "transform": transform, "host": "spark"}


def as_written(path: str, value: Mapping[str, Any] | None, spelling: Spelling) -> str:
    """Return a problem's `path` (in the form of flows) as the user wrote it, in `value` if that is known."""
    parts = path.split(".") if path else []
    if parts and parts[0] == "transform":
        if spelling == "flow":
            short = value is not None and not isinstance(value.get("transform"), Mapping)
            return ".".join(parts[:1] + parts[2:]) if short and parts[1:2] in (["steps"], ["function"]) else path
        inner = {ours: name for name, ours in _STREAM.items()}
        whole = "steps" if spelling == "pipeline" else "transform"
        parts = [inner.get(parts[1], parts[1]), *parts[2:]] if parts[1:] else [whole]
    names = {"stream": _STREAM_NAMES, "pipeline": _PIPELINE_NAMES, "flow": {}}[spelling]
    if parts:
        parts[0] = {ours: name for name, ours in names.items()}.get(parts[0], parts[0])
    return ".".join(_of_stream(parts, value or {}) if spelling == "stream" else parts)


def _of_stream(parts: Sequence[str], value: Mapping[str, Any]) -> Iterator[str]:
    parts = list(parts)
    if parts and parts[0] in ("source", "sink", "late"):
        part = value.get(parts[0])
        given = part if isinstance(part, Mapping) else {}
        inner = parts[1] if len(parts) > 1 else None
        if "kind" not in given:
            if inner in _CLUSTER and "kafka" in given:
                parts.insert(1, "kafka")
            elif "opensearch" in given and inner is not None and inner not in ("key", "dead_letters"):
                parts.insert(1, "opensearch")
            elif inner == "path" and "delta" in given:
                parts[1] = "delta"
    yield from parts
