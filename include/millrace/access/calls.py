"""What each call of the log's server needs, and each type of message: the one table that every door asks.

A call that is not here is no call: it is refused to everybody. docs/access.md has the table, made from this one.

Calls are named as they cross the wire: an action by its type, a stream by its Flight method (those of an extension behind its
name), a call of the coordinator behind ``append/catalog/``. Another service has a table of its own, of these values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from millrace.access.grants import Caller, Kind, Resource, Role
from millrace.base.errors import InvalidArgument
from millrace.message.types import BEHAVIOUR, MessageType

CATALOG: Final = "append/catalog/"
"""Begins the names of the coordinator's calls."""


class Over(Enum):
    """What a need is over, where it is no resource that the request names."""

    ANYTHING = "anything"
    """A role over anything at all is enough: the call says nothing of resources, or its parts are judged one by one."""
    EVERYTHING = "everything"
    """The role over the whole deployment."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a call asks of its caller: one of `roles`, over a resource of that kind which the request names under `key`."""

    roles: tuple[Role, ...]
    over: Kind | Over
    key: str = ""
    words: str = ""
    """What the documentation says of it."""

    def resources(self, request: Mapping[str, Any]) -> tuple[Resource, ...] | None:
        """As :meth:`millrace.access.grants.Principal.has` takes them. Raises InvalidArgument where the request names none."""
        if isinstance(self.over, Over):
            return None if self.over is Over.ANYTHING else ()
        name = request.get(self.key)
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the request needs {self.key!r} among its arguments, a name")
        return (Resource(self.over, name),)


def channel_resources(vchannel: str) -> tuple[Resource, ...]:
    """What a VChannel's name says that it is part of: whoever has its PChannel has it too."""
    return Resource(Kind.PCHANNEL, vchannel.rpartition("_")[0]), Resource(Kind.VCHANNEL, vchannel)


_ANY: Final = (Role.READ, Role.PRODUCE)
_READ: Final = (Role.READ,)
_PRODUCE: Final = (Role.PRODUCE,)
_OPERATE: Final = (Role.OPERATE,)
_ADMIN: Final = (Role.ADMIN,)

CALLS: Final[Mapping[str, Need]] = {
    "ping": Need(_ANY, Over.ANYTHING, words="whether the server lives"),
    "names": Need(_ANY, Over.ANYTHING, words="the PChannels' names"),
    "open": Need(_ANY, Over.ANYTHING, words="whether a PChannel is there"),
    "do_get": Need(_READ, Kind.PCHANNEL, "pchannel", "read the log itself, all VChannels together"),
    "describe": Need(_READ, Kind.PCHANNEL, "pchannel", "begin, end and bytes of a log"),
    "ends": Need(_READ, Over.EVERYTHING, words="where logs end"),
    "groups": Need(_READ, Over.EVERYTHING, words="names of the log's consumer groups"),
    "group_position": Need(_READ, Kind.GROUP, "group", "where a group stands"),
    "move_group": Need(_READ, Kind.GROUP, "group", "move a group"),
    "clock": Need(_READ, Over.EVERYTHING, words="the clock that the log stamps by"),
    "verify": Need(_OPERATE, Kind.PCHANNEL, "pchannel", "read a log back against its checksums"),
    "do_exchange": Need(_ADMIN, Kind.PCHANNEL, "append", "append to the log past the chain's door"),
    "create": Need(_ADMIN, Kind.PCHANNEL, "pchannel", "make a log"),
    "drop": Need(_ADMIN, Kind.PCHANNEL, "pchannel", "destroy a log"),
    "truncate": Need(_ADMIN, Kind.PCHANNEL, "pchannel", "remove a log's beginning"),
    "retain": Need(_ADMIN, Kind.PCHANNEL, "pchannel", "remove what retention allows"),
    "drop_group": Need(_ADMIN, Kind.GROUP, "group", "forget a group and its positions"),
    "accept_clock": Need(_ADMIN, Over.EVERYTHING, words="believe the wall clock, however far it leapt"),
    "shutdown": Need(_ADMIN, Over.EVERYTHING, words="stop the server"),
    "append/do_exchange": Need(_PRODUCE, Over.ANYTHING, words="append messages: each is judged by itself, see below"),
    "append/do_get": Need(
        _READ,
        Over.ANYTHING,
        words="new messages and those of the `wal` table, of the VChannels that one may read; the rows of a collection or an"
        " import that one may read",
    ),
    "append/history": Need(_READ, Over.ANYTHING, words="up to where the `wal` table has a PChannel, and from where on"),
    "append/checkpointed": Need(
        _READ, Over.ANYTHING, words="where changes of a collection begin, of those that one may read"
    ),
    "append/group": Need(
        _READ, Kind.GROUP, "group", "take a consumer group's place on a PChannel, and move the group there"
    ),
    "append/drop_group": Need(_ADMIN, Kind.GROUP, "group", "forget a consumer group and where it stands"),
    "append/assignments": Need(_ANY, Over.ANYTHING, words="which nodes take the appends of which PChannels"),
    "append/tick": Need(_ANY, Over.ANYTHING, words="have a time tick appended"),
    "append/confirm": Need(_ANY, Over.ANYTHING, words="wait until a tick is decided"),
    "append/mvcc": Need(_READ, Over.ANYTHING, words="up to where a VChannel can be read, of those that one may read"),
    "append/flow": Need(_ANY, Over.ANYTHING, words="the state of flow control"),
    "append/describe": Need(_READ, Kind.PCHANNEL, "pchannel", "where the append host stands"),
    "append/definitions": Need(_OPERATE, Kind.PCHANNEL, "pchannel", "what the chain has of collections"),
    "append/restart": Need(_OPERATE, Kind.PCHANNEL, "pchannel", "follow a PChannel anew, once what parked it is cured"),
    "append/tombstone": Need(
        _ADMIN, Kind.PCHANNEL, "pchannel", "look at an entry that parks its PChannel, and replace it"
    ),
    "append/metrics": Need(_READ, Over.EVERYTHING, words="the server's metrics"),
    "append/catalog": Need(_ANY, Over.ANYTHING, words="a call of the coordinator: the next rows"),
    CATALOG + "term": Need(_ANY, Over.ANYTHING, words="the newest term of a PChannel"),
    CATALOG + "pchannels": Need(_ANY, Over.ANYTHING, words="the PChannels and their terms"),
    CATALOG + "next_epoch": Need(_PRODUCE, Over.ANYTHING, words="an epoch for a producer's id"),
    CATALOG + "collection": Need(_ANY, Kind.COLLECTION, "name", "a collection's definition"),
    CATALOG + "collections": Need(_ANY, Over.ANYTHING, words="the definitions of those that one has a role on"),
    CATALOG + "create_collection": Need(_OPERATE, Kind.COLLECTION, "name", "make a collection"),
    CATALOG + "create_partition": Need(_OPERATE, Kind.COLLECTION, "name", "add a partition"),
    CATALOG + "add_field": Need(_OPERATE, Kind.COLLECTION, "name", "add a field"),
    CATALOG + "alter": Need(_OPERATE, Kind.COLLECTION, "name", "change the schema"),
    CATALOG + "flush": Need(_OPERATE, Kind.COLLECTION, "name", "seal and flush what grows"),
    CATALOG + "ensure_pchannels": Need(_OPERATE, Over.EVERYTHING, words="add PChannels"),
    CATALOG + "open_term": Need(
        _OPERATE, Kind.PCHANNEL, "pchannel", "open a PChannel's next term, with another config"
    ),
    CATALOG + "drop_collection": Need(_ADMIN, Kind.COLLECTION, "name", "drop a collection with its rows"),
    CATALOG + "drop_partition": Need(_ADMIN, Kind.COLLECTION, "name", "drop a partition with its rows"),
}
"""Every call of the log's server, its append host and its coordinator."""

_ROWS: Final = (
    MessageType.INSERT,
    MessageType.DELETE,
    MessageType.UPSERT,
    MessageType.BEGIN_TXN,
    MessageType.COMMIT_TXN,
    MessageType.ROLLBACK_TXN,
    MessageType.KEEP_ALIVE,
)

MESSAGES: Final[Mapping[MessageType, Need]] = {
    **{kind: Need(_ADMIN, Over.EVERYTHING) for kind in BEHAVIOUR},
    **{kind: Need(_PRODUCE, Kind.VCHANNEL) for kind in _ROWS},
    MessageType.MANUAL_FLUSH: Need(_OPERATE, Kind.VCHANNEL),
}
"""Who may put a message of a type into an append. What is not here nobody but an admin of everything may."""


def require(
    caller: Caller, call: str, request: Mapping[str, Any] | None = None, *, calls: Mapping[str, Need] = CALLS
) -> None:
    """Let a call with that request in. Raises PermissionDenied, InvalidArgument for no call at all."""
    need = calls.get(call)
    if need is None:
        raise InvalidArgument(f"there is no call {call[:100]!r}")
    caller.require_live()
    caller.principal.require(need.roles, need.resources(request or {}), call)


def may_see(caller: Caller, resources: Sequence[Resource]) -> bool:
    """Whether a definition or message of such resources may be shown: where any role is over one of them."""
    return caller.principal.has(_ANY, resources)
