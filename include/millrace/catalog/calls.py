"""The catalog's calls by name, with JSON requests and answers (docs/wire-form.md).

This module has both sides: the dispatcher of the process that serves the log, and the client's catalog.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Unpack

from millrace.access.grants import Caller, Resource, ResourceKind
from millrace.access.permissions import CATALOG_PREFIX, authorize, may_see
from millrace.base.errors import ChannelNotFound, InvalidArgument
from millrace.catalog.collection import DEFAULT_PARTITION, CollectionInfo, PChannel
from millrace.catalog.protocol import Catalog, CollectionOptions
from millrace.message.schema import CollectionSchema, FieldSpec

if TYPE_CHECKING:  # only programs that change schemas need it
    from millrace.message.schema_changes import SchemaChange

Arguments = Mapping[str, Any]
_NAMES: Final = ("name", "partition", "pchannel")
_REQUEST: Final = re.compile(r"[0-9A-Za-z-]{0,64}")


class CatalogCall(NamedTuple):
    """A call's handler, and why it may be repeated after a lost answer: it only reads, is idempotent, or has a request
    id.
    """

    handler: Callable[[Catalog, Arguments], dict[str, Any]]
    read_only: bool = False
    idempotent: bool = False
    has_request_id: bool = False


def _next_epoch(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    held = given.get("held")
    held = None if held is None else int(held)
    return {"epoch": catalog.next_epoch(int(given["producer_id"]), held=held, request=_request(given))}


def _collections(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"collections": [each.to_json() for each in catalog.collections(dropped=bool(given.get("dropped", False)))]}


def _ensure_pchannels(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"pchannels": [asdict(each) for each in catalog.ensure_pchannels(int(given["count"]))]}


def _open_term(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    if given["pchannel"] not in [each.name for each in catalog.pchannels()]:
        raise ChannelNotFound(f"the deployment has no PChannel {given['pchannel']!r}")
    config = {str(name): int(value) for name, value in (given.get("config") or {}).items()}
    return {"term": catalog.open_term(given["pchannel"], config=config, request=_request(given))}


def _create(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    schema = CollectionSchema.from_json(given["schema"], declared=True)
    made = catalog.create_collection(
        given["name"],
        schema,
        vchannels=int(given["vchannels"]),
        partitions=list(given["partitions"]),
        exist_ok=bool(given.get("exist_ok", False)),
        restored=bool(given.get("restored", False)),
        request=_request(given),
    )
    return made.to_json()


def _drop(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.drop_collection(given["name"], request=_request(given))
    return {}


def _create_partition(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    restored = bool(given.get("restored", False))
    made = catalog.create_partition(given["name"], given["partition"], restored=restored, request=_request(given))
    return {"id": made}


def _drop_partition(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.drop_partition(given["name"], given["partition"], request=_request(given))
    return {}


def _add_field(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    from millrace.message.schema_changes import AddField

    # The only change that clients of earlier builds know.
    return {"version": catalog.alter(given["name"], [AddField(FieldSpec.from_json(given["field"], declared=True))])}


def _alter(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    from millrace.message.schema_changes import change_from_json

    changes = [change_from_json(each) for each in given["changes"]]
    return {"version": catalog.alter(given["name"], changes, request=_request(given))}


def _flush(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"ticks": catalog.flush(given["name"], request=_request(given))}


def _request(given: Arguments) -> str:
    request = given.get("request", "")
    if not isinstance(request, str) or not _REQUEST.fullmatch(request):
        raise InvalidArgument("the 'request' of a call is its id: up to 64 letters, digits and '-'")
    return request


CATALOG_CALLS: Final = {
    "pchannels": CatalogCall(
        lambda catalog, given: {"pchannels": [asdict(each) for each in catalog.pchannels()]}, read_only=True
    ),
    "term": CatalogCall(lambda catalog, given: {"term": catalog.term(given["pchannel"])}, read_only=True),
    "collection": CatalogCall(lambda catalog, given: catalog.collection(given["name"]).to_json(), read_only=True),
    "collections": CatalogCall(_collections, read_only=True),
    "next_epoch": CatalogCall(_next_epoch, has_request_id=True),
    "ensure_pchannels": CatalogCall(_ensure_pchannels, idempotent=True),
    "open_term": CatalogCall(_open_term, has_request_id=True),
    "create_collection": CatalogCall(_create, has_request_id=True),
    "drop_collection": CatalogCall(_drop, has_request_id=True),
    "create_partition": CatalogCall(_create_partition, has_request_id=True),
    "drop_partition": CatalogCall(_drop_partition, has_request_id=True),
    "add_field": CatalogCall(_add_field),
    "alter": CatalogCall(_alter, has_request_id=True),
    "flush": CatalogCall(_flush, has_request_id=True),
}
"""All calls by name."""


def _shown(answer: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Remove the collections that the caller has no role on from an answer."""
    if "collections" in answer:
        seen = [
            each
            for each in answer["collections"]
            if may_see(caller, (Resource(ResourceKind.COLLECTION, each["name"]),))
        ]
        return answer | {"collections": seen}
    return answer


def dispatch(catalog: Catalog, name: str, arguments: Arguments, caller: Caller) -> dict[str, Any]:
    """Execute one call.

    Raises InvalidArgument if the call is unknown or its arguments are invalid, PermissionDenied, and whatever the call
    raises.
    """
    found = CATALOG_CALLS.get(name)
    if found is None:
        raise InvalidArgument(f"the coordinator has no call {name!r}; its calls are {', '.join(CATALOG_CALLS)}")
    wrong = [key for key in _NAMES if not isinstance(arguments.get(key, ""), str)]
    if wrong:
        raise InvalidArgument(f"{name}: {wrong[0]!r} must be a name, as text")
    authorize(caller, CATALOG_PREFIX + name, arguments)
    try:
        return _shown(found.handler(catalog, arguments), caller)
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise InvalidArgument(f"{name}: invalid arguments {dict(arguments)!r} ({error!r})") from error


class CatalogConnection(Protocol):
    """A connection to the process that serves the log."""

    def catalog(self, call: str, arguments: Arguments, *, repeat: bool) -> dict[str, Any]:
        """Make one call. If its answer is lost, `repeat` asks again; without it, LogUnavailable is raised."""
        ...


class RemoteCatalog:
    """The catalog of the deployment that a connection's server belongs to; implements Catalog."""

    def __init__(self, connection: CatalogConnection, *, pchannels: int | None = None) -> None:
        """Create the catalog.

        `pchannels`: PChannels that the first collection creates in a deployment without any; None: the server's
        setting.
        """
        self._connection = connection
        self._pchannels = pchannels

    def pchannels(self) -> list[PChannel]:
        return _pchannels(self._call("pchannels"))

    def term(self, pchannel: str) -> int:
        return int(self._call("term", pchannel=pchannel)["term"])

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        return int(self._call("next_epoch", producer_id=producer_id, held=held, request=request)["epoch"])

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        return [CollectionInfo.from_json(each) for each in self._call("collections", dropped=dropped)["collections"]]

    def collection(self, name: str) -> CollectionInfo:
        return CollectionInfo.from_json(self._call("collection", name=name))

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        return _pchannels(self._call("ensure_pchannels", count=count))

    def open_term(self, name: str, *, config: Mapping[str, int] | None = None, request: str = "") -> int:
        return int(self._call("open_term", pchannel=name, config=dict(config or {}), request=request)["term"])

    def create_collection(
        self, name: str, schema: CollectionSchema, **options: Unpack[CollectionOptions]
    ) -> CollectionInfo:
        partitions = options.get("partitions", (DEFAULT_PARTITION,))
        if isinstance(partitions, str):
            raise InvalidArgument("a collection needs a list of partitions")
        if self._pchannels is not None and not self.pchannels():
            self.ensure_pchannels(self._pchannels)
        made = self._call(
            "create_collection",
            name=name,
            schema=schema.as_declared().to_json(),
            vchannels=options.get("vchannels", 1),
            partitions=list(partitions),
            exist_ok=options.get("exist_ok", False),
            restored=options.get("restored", False),
            request=options.get("request", ""),
        )
        return CollectionInfo.from_json(made)

    def drop_collection(self, name: str, *, request: str = "") -> None:
        self._call("drop_collection", name=name, request=request)

    def create_partition(self, name: str, partition: str, *, restored: bool = False, request: str = "") -> int:
        made = self._call("create_partition", name=name, partition=partition, restored=restored, request=request)
        return int(made["id"])

    def drop_partition(self, name: str, partition: str, *, request: str = "") -> None:
        self._call("drop_partition", name=name, partition=partition, request=request)

    def alter(self, name: str, changes: Sequence[SchemaChange], *, request: str = "") -> int:
        from millrace.message.schema_changes import change_to_json

        said = [change_to_json(each) for each in changes]
        return int(self._call("alter", name=name, changes=said, request=request)["version"])

    def flush(self, name: str, *, request: str = "") -> dict[str, int]:
        ticks = self._call("flush", name=name, request=request)["ticks"]
        return {str(channel): int(tick) for channel, tick in ticks.items()}

    def _call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        found = CATALOG_CALLS[name]
        if found.has_request_id and not arguments["request"]:
            arguments["request"] = uuid.uuid4().hex
        return self._connection.catalog(
            name, arguments, repeat=found.read_only or found.idempotent or found.has_request_id
        )


def _pchannels(answer: Mapping[str, Any]) -> list[PChannel]:
    return [PChannel(**each) for each in answer["pchannels"]]
