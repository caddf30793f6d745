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

from millrace.access.grants import Caller, Resource, ResourceKind, Role
from millrace.base.errors import InvalidArgument
from millrace.message.types import BEHAVIOUR, MessageType

CATALOG_PREFIX: Final = "append/catalog/"
"""Begins the names of the coordinator's calls."""


class Scope(Enum):
    """What a need is over, where it is no resource that the request names."""

    ANYTHING = "anything"
    """A role over anything at all is enough: the call says nothing of resources, or its parts are judged one by one."""
    EVERYTHING = "everything"
    """The role over the whole deployment."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a call asks of its caller: one of `roles`, over a resource of that kind which the request names under `key`."""

    roles: tuple[Role, ...]
    scope: ResourceKind | Scope
    argument: str = ""
    description: str = ""
    """What the documentation says of it."""

    def resources(self, request: Mapping[str, Any]) -> tuple[Resource, ...] | None:
        """As :meth:`millrace.access.grants.Principal.has` takes them. Raises InvalidArgument where the request names none."""
        if isinstance(self.scope, Scope):
            return None if self.scope is Scope.ANYTHING else ()
        name = request.get(self.argument)
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the request needs {self.argument!r} among its arguments, a name")
        return (Resource(self.scope, name),)


def channel_resources(vchannel: str) -> tuple[Resource, ...]:
    """What a VChannel's name says that it is part of: whoever has its PChannel has it too."""
    return Resource(ResourceKind.PCHANNEL, vchannel.rpartition("_")[0]), Resource(ResourceKind.VCHANNEL, vchannel)


_ANY: Final = (Role.READ, Role.PRODUCE)
_READ: Final = (Role.READ,)
_PRODUCE: Final = (Role.PRODUCE,)
_OPERATE: Final = (Role.OPERATE,)
_ADMIN: Final = (Role.ADMIN,)

CALL_REQUIREMENTS: Final[Mapping[str, Requirement]] = {
    "ping": Requirement(_ANY, Scope.ANYTHING, description="whether the server lives"),
    "names": Requirement(_ANY, Scope.ANYTHING, description="the PChannels' names"),
    "open": Requirement(_ANY, Scope.ANYTHING, description="whether a PChannel is there"),
    "do_get": Requirement(_READ, ResourceKind.PCHANNEL, "pchannel", "read the log itself, all VChannels together"),
    "describe": Requirement(_READ, ResourceKind.PCHANNEL, "pchannel", "begin, end and bytes of a log"),
    "ends": Requirement(_READ, Scope.EVERYTHING, description="where logs end"),
    "groups": Requirement(_READ, Scope.EVERYTHING, description="names of the log's consumer groups"),
    "group_position": Requirement(_READ, ResourceKind.GROUP, "group", "where a group stands"),
    "move_group": Requirement(_READ, ResourceKind.GROUP, "group", "move a group"),
    "clock": Requirement(_READ, Scope.EVERYTHING, description="the clock that the log stamps by"),
    "verify": Requirement(_OPERATE, ResourceKind.PCHANNEL, "pchannel", "read a log back against its checksums"),
    "do_exchange": Requirement(_ADMIN, ResourceKind.PCHANNEL, "append", "append to the log past the chain's door"),
    "create": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "make a log"),
    "drop": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "destroy a log"),
    "truncate": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "remove a log's beginning"),
    "retain": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "remove what retention allows"),
    "drop_group": Requirement(_ADMIN, ResourceKind.GROUP, "group", "forget a group and its positions"),
    "accept_clock": Requirement(_ADMIN, Scope.EVERYTHING, description="believe the wall clock, however far it leapt"),
    "shutdown": Requirement(_ADMIN, Scope.EVERYTHING, description="stop the server"),
    "append/do_exchange": Requirement(
        _PRODUCE, Scope.ANYTHING, description="append messages: each is judged by itself, see below"
    ),
    "append/do_get": Requirement(
        _READ,
        Scope.ANYTHING,
        description="new messages and those of the `wal` table, of the VChannels that one may read; the rows of a collection or an"
        " import that one may read",
    ),
    "append/history": Requirement(
        _READ, Scope.ANYTHING, description="up to where the `wal` table has a PChannel, and from where on"
    ),
    "append/checkpointed": Requirement(
        _READ, Scope.ANYTHING, description="where changes of a collection begin, of those that one may read"
    ),
    "append/group": Requirement(
        _READ, ResourceKind.GROUP, "group", "take a consumer group's place on a PChannel, and move the group there"
    ),
    "append/drop_group": Requirement(
        _ADMIN, ResourceKind.GROUP, "group", "forget a consumer group and where it stands"
    ),
    "append/assignments": Requirement(
        _ANY, Scope.ANYTHING, description="which nodes take the appends of which PChannels"
    ),
    "append/tick": Requirement(_ANY, Scope.ANYTHING, description="have a time tick appended"),
    "append/confirm": Requirement(_ANY, Scope.ANYTHING, description="wait until a tick is decided"),
    "append/mvcc": Requirement(
        _READ, Scope.ANYTHING, description="up to where a VChannel can be read, of those that one may read"
    ),
    "append/flow": Requirement(_ANY, Scope.ANYTHING, description="the state of flow control"),
    "append/describe": Requirement(_READ, ResourceKind.PCHANNEL, "pchannel", "where the append host stands"),
    "append/definitions": Requirement(_OPERATE, ResourceKind.PCHANNEL, "pchannel", "what the chain has of collections"),
    "append/restart": Requirement(
        _OPERATE, ResourceKind.PCHANNEL, "pchannel", "follow a PChannel anew, once what parked it is cured"
    ),
    "append/tombstone": Requirement(
        _ADMIN, ResourceKind.PCHANNEL, "pchannel", "look at an entry that parks its PChannel, and replace it"
    ),
    "append/metrics": Requirement(_READ, Scope.EVERYTHING, description="the server's metrics"),
    "append/catalog": Requirement(_ANY, Scope.ANYTHING, description="a call of the coordinator: the next rows"),
    CATALOG_PREFIX + "term": Requirement(_ANY, Scope.ANYTHING, description="the newest term of a PChannel"),
    CATALOG_PREFIX + "pchannels": Requirement(_ANY, Scope.ANYTHING, description="the PChannels and their terms"),
    CATALOG_PREFIX + "next_epoch": Requirement(_PRODUCE, Scope.ANYTHING, description="an epoch for a producer's id"),
    CATALOG_PREFIX + "collection": Requirement(_ANY, ResourceKind.COLLECTION, "name", "a collection's definition"),
    CATALOG_PREFIX + "collections": Requirement(
        _ANY, Scope.ANYTHING, description="the definitions of those that one has a role on"
    ),
    CATALOG_PREFIX + "create_collection": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "make a collection"),
    CATALOG_PREFIX + "create_partition": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "add a partition"),
    CATALOG_PREFIX + "add_field": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "add a field"),
    CATALOG_PREFIX + "alter": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "change the schema"),
    CATALOG_PREFIX + "flush": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "seal and flush what grows"),
    CATALOG_PREFIX + "ensure_pchannels": Requirement(_OPERATE, Scope.EVERYTHING, description="add PChannels"),
    CATALOG_PREFIX + "open_term": Requirement(
        _OPERATE, ResourceKind.PCHANNEL, "pchannel", "open a PChannel's next term, with another config"
    ),
    CATALOG_PREFIX + "drop_collection": Requirement(
        _ADMIN, ResourceKind.COLLECTION, "name", "drop a collection with its rows"
    ),
    CATALOG_PREFIX + "drop_partition": Requirement(
        _ADMIN, ResourceKind.COLLECTION, "name", "drop a partition with its rows"
    ),
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

MESSAGE_REQUIREMENTS: Final[Mapping[MessageType, Requirement]] = {
    **{kind: Requirement(_ADMIN, Scope.EVERYTHING) for kind in BEHAVIOUR},
    **{kind: Requirement(_PRODUCE, ResourceKind.VCHANNEL) for kind in _ROWS},
    MessageType.MANUAL_FLUSH: Requirement(_OPERATE, ResourceKind.VCHANNEL),
}
"""Who may put a message of a type into an append. What is not here nobody but an admin of everything may."""


def authorize(
    caller: Caller,
    call: str,
    request: Mapping[str, Any] | None = None,
    *,
    calls: Mapping[str, Requirement] = CALL_REQUIREMENTS,
) -> None:
    """Let a call with that request in. Raises PermissionDenied, InvalidArgument for no call at all."""
    need = calls.get(call)
    if need is None:
        raise InvalidArgument(f"there is no call {call[:100]!r}")
    caller.require_valid()
    caller.principal.require_role(need.roles, need.resources(request or {}), call)


def may_see(caller: Caller, resources: Sequence[Resource]) -> bool:
    """Whether a definition or message of such resources may be shown: where any role is over one of them."""
    return caller.principal.has_role(_ANY, resources)
