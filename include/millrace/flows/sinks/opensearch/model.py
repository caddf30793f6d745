"""The declaration of an OpenSearch sink."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator, model_validator

from millrace.flows.declare.addresses import check_address, host_of
from millrace.flows.declare.part import Part, Secret, check_certificates, check_json, words
from millrace.flows.declare.paths import FieldPath, date_form, template
from millrace.flows.kinds import SinkKind
from millrace.flows.sinks.models import names_of


def _url(text: str) -> str:
    check_address(text.partition("://")[2].removesuffix("/"))
    return text


Url: TypeAlias = Annotated[
    str, StringConstraints(pattern=r"^https?://[^\s/@?#]+/?$", max_length=500), AfterValidator(_url)
]


_NAME: Final = r"^[^\s_+\-\\/*?\"<>|,#:][^\s\\/*?\"<>|,#:]*$"


def _index(name: str) -> str:
    if name in (".", "..") or name != name.lower() or len(name.encode()) > 255:
        raise ValueError("is not an index name: use lower case, at most 255 bytes")
    return name


def index_name(name: str) -> str:
    """Return `name` if it is a valid index name. Raises ValueError with the rule."""
    if re.match(_NAME, name) is None:
        raise ValueError(
            'is not an index name: it has no space and none of \\ / * ? " < > | , # : and does not start with _ + -'
        )
    return _index(name)


IndexName: TypeAlias = Annotated[
    str,
    StringConstraints(min_length=1, pattern=_NAME),
    AfterValidator(_index),
]
"""The name of an index, an alias or a data stream, by OpenSearch's own rule."""


def _suffix(text: str) -> str:
    if text:
        for path in template(text, dates=True).paths:
            if path[0].startswith("+"):
                date_form(path[0][1:])
    return text


def _index_body(value: dict[str, Any]) -> dict[str, Any]:
    check_json(value)
    settings = value.get("settings")
    places = {name: value.get(name) for name in ("settings", "mappings", "aliases")}
    if isinstance(settings, dict):
        places["settings.index"] = settings.get("index")
    for name, found in places.items():
        if not (found is None or isinstance(found, dict)):
            raise ValueError(f"its {name} is an object")
    return value


class Rollover(Part):
    """Conditions for a new index of an alias, checked once a minute."""

    docs: int | None = words("documents in the newest index", default=None, ge=1)
    age: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*[dhms]$")] | None = words(
        "age of the newest index, such as 7d or 12h", default=None
    )
    size: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(b|kb|mb|gb|tb)$")] | None = words(
        "size of its primary shards, such as 50gb", default=None
    )

    @model_validator(mode="after")
    def _some(self) -> Rollover:
        if self.docs is None and self.age is None and self.size is None:
            raise ValueError("has no condition: set docs, age or size")
        return self

    def conditions(self) -> dict[str, int | str]:
        """Return the conditions in OpenSearch's form."""
        given = {"max_docs": self.docs, "max_age": self.age, "max_size": self.size}
        return {name: value for name, value in given.items() if value is not None}


class OpenSearchSink(Part):
    """Rows or documents into an index by bulk requests, item by item."""

    of_rows: ClassVar = frozenset({"key", "dead_letters"})

    kind: Literal["opensearch"] = "opensearch"
    hosts: Annotated[tuple[Url, ...], Field(min_length=1, max_length=32)] = words("http(s)://host:port each")
    index_base: IndexName = words("the index (or alias) of the documents")
    create_index: bool = words(
        "create the index if it does not exist; otherwise a missing index is an error", default=False
    )
    index_body: Annotated[dict[str, Any], AfterValidator(_index_body)] = words(
        "settings and mappings of a created index", default_factory=dict
    )
    data_stream: bool = words(
        "index_base is a data stream: documents are added by their ids, never replaced or deleted, and get the record's"
        " time as @timestamp if they have none",
        default=False,
    )
    index_suffix: Annotated[str, AfterValidator(_suffix)] = words(
        "the suffix of index_base in the name of a document's index: -{origin}-{+YYYY.MM.dd} has a field's value and"
        " the record's date (UTC); the indices are created by a template of index_body",
        default="",
        max_length=500,
    )
    rollover: Rollover | None = words(
        "index_base is an alias, which rolls over to a new index when one of these is reached", default=None
    )
    ids: Literal["position", "key", "template"] = words(
        "a document's id: topic-partition-offset; the record's key; or the result of the step template_id",
        default="position",
    )
    versions: bool = words(
        "with ids by key or template: the record's offset is the document's external version, so that the newest wins;"
        " all records of an id must be in one partition",
        default=True,
    )
    version_field: FieldPath | None = words(
        "a path in the document to a whole number or time (ISO 8601 with zone) that replaces the offset as the version:"
        " the larger wins, or the later of equal ones",
        default=None,
    )
    tombstones: Literal["delete", "ignore", "error"] = words(
        "the effect of a record without a value on its key", default="delete"
    )
    username: str = words("", default="", max_length=256, pattern=r"^[^:\x00-\x1f\x7f]*$")
    password: Secret = words("write-only", default=Secret(""))
    ca: str = words("CA certificates (PEM) for the hosts; empty: the system's", default="", max_length=1 << 18)
    timeout_ms: int = words("longest wait for one bulk request", default=30_000, ge=10, le=600_000)
    refresh: bool = words("make each bulk searchable at once; costs throughput", default=False)
    requests: int = words("bulk requests of one task in flight, each with other keys", default=2, ge=1, le=16)
    backoff_ms: int = words(
        "first pause when the cluster responds with 429 or 503, or not at all; doubles, with jitter",
        default=200,
        ge=1,
        le=60_000,
    )
    max_backoff_ms: int = words("longest such pause", default=10_000, ge=1, le=600_000)
    patience_ms: int = words(
        "how long one bulk is retried before its task fails, to be recovered later",
        default=60_000,
        ge=0,
        le=3_600_000,
    )
    key: str | None = words("for rows: the columns of a document's id, separated by commas", default=None)
    dead_letters: str | None = words("a collection for rows that the index refuses", default=None)

    def addresses(self) -> Iterator[tuple[str, str]]:
        yield from ((f"hosts.{place}", host_of(url.partition("://")[2])) for place, url in enumerate(self.hosts))

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that `key` lists."""
        return names_of(self.key)

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"opensearch:{self.index_base}"

    @field_validator("ca")
    @classmethod
    def _signs(cls, ca: str, info: ValidationInfo) -> str:
        if any(host.startswith("https") for host in info.data.get("hosts", ())):
            check_certificates(ca)
        return ca

    @model_validator(mode="after")
    def _fits(self) -> OpenSearchSink:
        if bool(self.username) != bool(self.password.get_secret_value()):
            raise ValueError("username and password are a pair: give both or neither")
        if self.max_backoff_ms < self.backoff_ms:
            raise ValueError("max_backoff_ms must be at least backoff_ms")
        if self.version_field is not None and (not self.versions or self.ids == "position"):
            raise ValueError("version_field needs versions, with ids by key or template: set versions to true, and ids")
        if self.version_field is not None and self.tombstones == "delete":
            raise ValueError(
                "with version_field a record without a value has no version: set tombstones to ignore or error"
            )
        many = [self.data_stream, bool(self.index_suffix), self.rollover is not None]
        if sum(many) > 1:
            raise ValueError("data_stream, index_suffix and rollover exclude each other: set one of them")
        if any(many) and not self.create_index and not self.data_stream:
            raise ValueError("index_suffix and rollover create indices: set create_index to true")
        if (self.data_stream or self.rollover is not None) and self.ids != "position" and self.versions:
            raise ValueError(
                "a data stream and a rolled-over alias can only add documents: set ids to position, or"
                " versions to false"
            )
        if any(many) and self.tombstones == "delete" and self.ids != "position":
            raise ValueError(
                "a record without a value cannot find its document in many indices: set tombstones to ignore or error"
            )
        if self.index_body and not self.create_index:
            raise ValueError("index_body is for a created index: set create_index to true")
        return self


KIND: Final = SinkKind(
    "opensearch",
    OpenSearchSink,
    "millrace.flows.sinks.opensearch.sink:made",
    "effectively once: a document replaces the one of its id, by version if versions are declared",
)
