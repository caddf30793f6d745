"""The coordinator's calls (millrace.rpc.calls; docs/wire-form.md).

Their handlers and dispatch, and the client's catalog.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack

from millrace.access.grants import Caller, Resource, ResourceKind
from millrace.access.permissions import authorize, channel_resources, may_see
from millrace.base.errors import ChannelNotFound, InvalidArgument
from millrace.catalog.broadcast import MESSAGE_KIND, BroadcastResult, message_from_json, message_to_json
from millrace.catalog.collection import (
    DEFAULT_PARTITION,
    MAX_PAGE_SIZE,
    CollectionInfo,
    CollectionPage,
    CollectionQuery,
    PChannel,
)
from millrace.catalog.definition_cache import DefinitionCache
from millrace.catalog.protocol import Catalog, CollectionOptions
from millrace.message.model import MutableMessage
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.rpc import calls
from millrace.rpc.calls import (
    CATALOG_PREFIX,
    SERVER_CALLS,
    Repeat,
    ServerCall,
    handlers_of,
    handles,
    server_calls,
)

if TYPE_CHECKING:  # only programs that change schemas need it
    from millrace.message.schema_changes import SchemaChange

Arguments = Mapping[str, Any]
_NAMES: Final = ("name", "partition", "pchannel", "alias", "collection")
_REQUEST: Final = re.compile(r"[0-9A-Za-z-]{0,64}")


class ServedCatalog(Catalog, Protocol):
    """The catalog of the server that answers the calls."""

    def collection_page(self, query: CollectionQuery) -> CollectionPage:
        """Return one page of the collections."""
        ...

    def collection_name(self, name: str, *, request: str = "") -> str:
        """Return the name of the collection with this name or alias; `name` itself if there is none.

        For a `request` that is stored already: the collection that it changed.
        """
        ...

    def collection_of(self, vchannel: str) -> str | None:
        """Return the name of a VChannel's collection; None if there is none."""
        ...

    def acting_for(self, principal: str) -> ServedCatalog:
        """Return the catalog, which stamps what it appends with the name of `principal`."""
        ...


@handles(calls.PCHANNELS)
def _pchannels(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"pchannels": [asdict(each) for each in catalog.pchannels()]}


@handles(calls.TERM)
def _term(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"term": catalog.term(given["pchannel"])}


@handles(calls.COLLECTION)
def _collection(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return catalog.collection(given["name"]).to_json()


@handles(calls.NEXT_EPOCH)
def _next_epoch(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    held = given.get("held")
    held = None if held is None else int(held)
    return {"epoch": catalog.next_epoch(int(given["producer_id"]), held=held, request=_request(given))}


@handles(calls.COLLECTIONS)
def _collections(catalog: ServedCatalog, given: Arguments) -> dict[str, Any]:
    if "ids" in given:
        return {"collections": [each.to_json() for each in catalog.collections_by_id(map(int, given["ids"])).values()]}
    dropped = bool(given.get("dropped", False))
    if "limit" not in given:  # a client of an earlier build reads no pages
        return {"collections": [each.to_json() for each in catalog.collections(dropped=dropped)]}
    page = catalog.collection_page(
        CollectionQuery(dropped, str(given.get("search", "")), str(given.get("after", "")), limit=int(given["limit"]))
    )
    return {"collections": [each.to_json() for each in page.items], "next": page.next}


@handles(calls.ENSURE_PCHANNELS)
def _ensure_pchannels(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"pchannels": [asdict(each) for each in catalog.ensure_pchannels(int(given["count"]))]}


@handles(calls.OPEN_TERM)
def _open_term(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    if given["pchannel"] not in [each.name for each in catalog.pchannels()]:
        raise ChannelNotFound(f"the deployment has no PChannel {given['pchannel']!r}")
    config = {str(name): int(value) for name, value in (given.get("config") or {}).items()}
    return {"term": catalog.open_term(given["pchannel"], config=config, request=_request(given))}


@handles(calls.CREATE_COLLECTION)
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


@handles(calls.DROP_COLLECTION)
def _drop(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.drop_collection(given["name"], request=_request(given))
    return {}


@handles(calls.CREATE_PARTITION)
def _create_partition(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    restored = bool(given.get("restored", False))
    made = catalog.create_partition(given["name"], given["partition"], restored=restored, request=_request(given))
    return {"id": made}


@handles(calls.DROP_PARTITION)
def _drop_partition(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.drop_partition(given["name"], given["partition"], request=_request(given))
    return {}


@handles(calls.ADD_FIELD)
def _add_field(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    from millrace.message.schema_changes import AddField

    # The only change that clients of earlier builds know.
    return {"version": catalog.alter(given["name"], [AddField(FieldSpec.from_json(given["field"], declared=True))])}


@handles(calls.ALTER)
def _alter(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    from millrace.message.schema_changes import change_from_json

    changes = [change_from_json(each) for each in given["changes"]]
    return {"version": catalog.alter(given["name"], changes, request=_request(given))}


@handles(calls.ALIASES)
def _aliases(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"aliases": catalog.aliases(given.get("collection"))}


@handles(calls.CREATE_ALIAS)
def _create_alias(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.create_alias(given["alias"], given["collection"], request=_request(given))
    return {}


@handles(calls.ALTER_ALIAS)
def _alter_alias(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.alter_alias(given["alias"], given["collection"], request=_request(given))
    return {}


@handles(calls.DROP_ALIAS)
def _drop_alias(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    catalog.drop_alias(given["alias"], request=_request(given))
    return {}


@handles(calls.FLUSH)
def _flush(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    return {"ticks": catalog.flush(given["name"], request=_request(given))}


@handles(calls.BROADCAST)
def _broadcast(catalog: Catalog, given: Arguments) -> dict[str, Any]:
    made = catalog.broadcast(
        [message_from_json(each) for each in given["messages"]],
        kind=given.get("kind", MESSAGE_KIND),
        data=given.get("data"),
        request=_request(given),
    )
    return {"id": made.id, "ticks": made.ticks}


def _authorize_targets(catalog: ServedCatalog, call: ServerCall, given: Arguments, caller: Caller) -> None:
    """Check that the caller has the call's role on every VChannel of a broadcast. Raises PermissionDenied."""
    for each in given["messages"]:
        vchannel = str(each["vchannel"])
        name = catalog.collection_of(vchannel)
        own = () if name is None else (Resource(ResourceKind.COLLECTION, name),)
        caller.principal.require_role(call.roles, channel_resources(vchannel) + own, call.name)


def _request(given: Arguments) -> str:
    request = given.get("request", "")
    if not isinstance(request, str) or not _REQUEST.fullmatch(request):
        raise InvalidArgument("the 'request' of a call is its id: up to 64 letters, digits and '-'")
    return request


_HANDLERS: Final = handlers_of(sys.modules[__name__], server_calls(CATALOG_PREFIX))


def _shown(answer: dict[str, Any], caller: Caller) -> dict[str, Any]:
    """Remove the collections that the caller has no role on from an answer, and their aliases."""

    def seen_by_name(name: str) -> bool:
        return may_see(caller, (Resource(ResourceKind.COLLECTION, name),))

    if "aliases" in answer:
        return {"aliases": {alias: name for alias, name in answer["aliases"].items() if seen_by_name(name)}}
    if "collections" in answer:
        seen = [each for each in answer["collections"] if seen_by_name(each["name"])]
        return answer | {"collections": seen}
    return answer


def _resolved(catalog: ServedCatalog, call: ServerCall, arguments: Arguments) -> Arguments:
    """Return a call's arguments with the name of the collection in place of its alias."""
    named = arguments.get(call.argument) if call.scope is ResourceKind.COLLECTION else None
    if not isinstance(named, str):
        return arguments
    return {**arguments, call.argument: catalog.collection_name(named, request=_request(arguments))}


def dispatch(catalog: ServedCatalog, name: str, arguments: Arguments, caller: Caller) -> dict[str, Any]:
    """Execute one call.

    Raises InvalidArgument if the call is unknown or its arguments are invalid, PermissionDenied, and whatever the call
    raises.
    """
    key = CATALOG_PREFIX + name
    handler = _HANDLERS.get(key)
    if handler is None:
        known = ", ".join(each.removeprefix(CATALOG_PREFIX) for each in _HANDLERS)
        raise InvalidArgument(f"the coordinator has no call {name!r}; its calls are {known}")
    wrong = [each for each in _NAMES if not isinstance(arguments.get(each, ""), str)]
    if wrong:
        raise InvalidArgument(f"{name}: {wrong[0]!r} must be a name, as text")
    call = SERVER_CALLS[key]
    resolved = _resolved(catalog, call, arguments)
    authorize(caller, key, resolved, calls=SERVER_CALLS)
    if call in (calls.CREATE_ALIAS, calls.ALTER_ALIAS) and "alias" in arguments:
        authorize(caller, key, {"collection": catalog.collection_name(arguments["alias"])}, calls=SERVER_CALLS)
    # What was authorized is what is changed, even if the alias is altered in between. Only the calls that treat an
    # alias differently get it.
    given = arguments if call in (calls.DROP_COLLECTION, calls.DROP_ALIAS) else resolved
    try:
        if call is calls.BROADCAST:
            _authorize_targets(catalog, call, given, caller)
        answer = handler(catalog.acting_for(caller.principal.name), given)
        if "collection" in call.answer:
            answer = {**answer, "collection": resolved[call.argument]}
        return call.checked(_shown(answer, caller))
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        # Cut: the messages of a broadcast are arguments, too.
        raise InvalidArgument(f"{name}: invalid arguments {dict(arguments)!r:.500} ({error!r:.500})") from error


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
        self.definitions = DefinitionCache(self._definition)
        """The cached definitions of collections, for appends by name."""

    def pchannels(self) -> list[PChannel]:
        return _pchannels_of(self._call(calls.PCHANNELS))

    def term(self, pchannel: str) -> int:
        return int(self._call(calls.TERM, pchannel=pchannel)["term"])

    def next_epoch(self, producer_id: int, *, held: int | None = None, request: str = "") -> int:
        return int(self._call(calls.NEXT_EPOCH, producer_id=producer_id, held=held, request=request)["epoch"])

    def collections(self, *, dropped: bool = False) -> list[CollectionInfo]:
        found: list[CollectionInfo] = []
        after: str | None = ""
        while after is not None:
            page = self._call(calls.COLLECTIONS, dropped=dropped, after=after, limit=MAX_PAGE_SIZE)
            found += map(CollectionInfo.from_json, page["collections"])
            after = page.get("next") or None
        return found

    def collections_by_id(self, ids: Iterable[int]) -> dict[int, CollectionInfo]:
        wanted = list(dict.fromkeys(ids))
        found = self._call(calls.COLLECTIONS, dropped=True, ids=wanted)["collections"]
        return {each["id"]: CollectionInfo.from_json(each) for each in found if each["id"] in wanted}

    def collection(self, name: str) -> CollectionInfo:
        return self.definitions.renew(name)

    def _definition(self, name: str) -> CollectionInfo:
        return CollectionInfo.from_json(self._call(calls.COLLECTION, name=name))

    def ensure_pchannels(self, count: int) -> list[PChannel]:
        return _pchannels_of(self._call(calls.ENSURE_PCHANNELS, count=count))

    def open_term(self, name: str, *, config: Mapping[str, int] | None = None, request: str = "") -> int:
        return int(self._call(calls.OPEN_TERM, pchannel=name, config=dict(config or {}), request=request)["term"])

    def create_collection(
        self, name: str, schema: CollectionSchema, **options: Unpack[CollectionOptions]
    ) -> CollectionInfo:
        partitions = options.get("partitions", (DEFAULT_PARTITION,))
        if isinstance(partitions, str):
            raise InvalidArgument("a collection needs a list of partitions")
        if self._pchannels is not None and not self.pchannels():
            self.ensure_pchannels(self._pchannels)
        with self.definitions.changing(name):
            made = self._call(
                calls.CREATE_COLLECTION,
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
        with self.definitions.changing(name):
            self._call(calls.DROP_COLLECTION, name=name, request=request)

    def create_partition(self, name: str, partition: str, *, restored: bool = False, request: str = "") -> int:
        arguments = {"partition": partition, "restored": restored, "request": request}
        return int(self._change(calls.CREATE_PARTITION, name, **arguments)["id"])

    def drop_partition(self, name: str, partition: str, *, request: str = "") -> None:
        self._change(calls.DROP_PARTITION, name, partition=partition, request=request)

    def alter(self, name: str, changes: Sequence[SchemaChange], *, request: str = "") -> int:
        from millrace.message.schema_changes import change_to_json

        said = [change_to_json(each) for each in changes]
        return int(self._change(calls.ALTER, name, changes=said, request=request)["version"])

    def flush(self, name: str, *, request: str = "") -> dict[str, int]:
        ticks = self._call(calls.FLUSH, name=name, request=request)["ticks"]
        return {str(channel): int(tick) for channel, tick in ticks.items()}

    def broadcast(
        self,
        messages: Sequence[MutableMessage],
        *,
        kind: str = MESSAGE_KIND,
        data: Mapping[str, Any] | None = None,
        request: str = "",
    ) -> BroadcastResult:
        sent = [message_to_json(each) for each in messages]
        made = self._call(calls.BROADCAST, messages=sent, kind=kind, data=dict(data or {}), request=request)
        return BroadcastResult(int(made["id"]), {str(name): int(tick) for name, tick in made["ticks"].items()})

    def aliases(self, collection: str | None = None) -> dict[str, str]:
        arguments = {} if collection is None else {"collection": collection}
        return {str(alias): str(name) for alias, name in self._call(calls.ALIASES, **arguments)["aliases"].items()}

    def create_alias(self, alias: str, collection: str, *, request: str = "") -> None:
        with self.definitions.changing(alias):
            self._call(calls.CREATE_ALIAS, alias=alias, collection=collection, request=request)

    def alter_alias(self, alias: str, collection: str, *, request: str = "") -> None:
        with self.definitions.changing(alias):
            self._call(calls.ALTER_ALIAS, alias=alias, collection=collection, request=request)

    def drop_alias(self, alias: str, *, request: str = "") -> None:
        with self.definitions.changing(alias):
            self._call(calls.DROP_ALIAS, alias=alias, request=request)

    def _change(self, call: ServerCall, name: str, **arguments: Any) -> dict[str, Any]:
        """Change the collection with a name or alias, and forget its cached definition under every name."""
        with self.definitions.changing(name):
            answer = self._call(call, name=name, **arguments)
        if (own := answer.get("collection", name)) != name:
            self.definitions.forget(own)
        return answer

    def _call(self, call: ServerCall, /, **arguments: Any) -> dict[str, Any]:
        repeat = call.repeat
        if repeat is Repeat.REQUEST_ID and not arguments["request"]:
            arguments["request"] = uuid.uuid4().hex
        name = call.name.removeprefix(CATALOG_PREFIX)
        return self._connection.catalog(name, arguments, repeat=repeat is not Repeat.NEVER)


def _pchannels_of(answer: Mapping[str, Any]) -> list[PChannel]:
    return [PChannel(**each) for each in answer["pchannels"]]
