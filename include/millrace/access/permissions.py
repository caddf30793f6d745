"""The permissions that each call of the log's server needs, and each message type: the one table that every server
checks.

A call that is not in the table is denied to everybody. docs/access.md has the table, generated from this one.

Calls are named as they cross the wire: an action by its type, a stream by its Flight method (prefixed with the name of
its extension), a call of the coordinator with the prefix ``append/catalog/``. Other services have tables of their own,
with the same types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from millrace.access.grants import Caller, Resource, ResourceKind, Role
from millrace.base.errors import InvalidArgument
from millrace.message.ids import pchannel_of
from millrace.message.types import BEHAVIOUR, MessageType

CATALOG_PREFIX: Final = "append/catalog/"
"""The prefix of the coordinator's calls."""


class Scope(Enum):
    """The scope of a requirement that names no resource."""

    ANYTHING = "anything"
    """A role on any resource is enough: the call concerns no resource, or checks its parts one by one."""
    EVERYTHING = "everything"
    """The role on the whole deployment."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a call requires of its caller: one of `roles` on the resource that the request names.

    `scope` is the resource's kind, `argument` the key of the request that has its name.
    """

    roles: tuple[Role, ...]
    scope: ResourceKind | Scope
    argument: str = ""
    description: str = ""
    """The description in the documentation."""

    def resources(self, request: Mapping[str, Any]) -> tuple[Resource, ...] | None:
        """Return the resources as :meth:`millrace.access.grants.Principal.has_role` takes them.

        Raises InvalidArgument if the request does not name the resource.
        """
        if isinstance(self.scope, Scope):
            return None if self.scope is Scope.ANYTHING else ()
        name = request.get(self.argument)
        if not isinstance(name, str) or not name:
            raise InvalidArgument(f"the request needs the argument {self.argument!r}, a name")
        return (Resource(self.scope, name),)


def channel_resources(vchannel: str) -> tuple[Resource, ...]:
    """Return the resources that a VChannel's name implies: a role on its PChannel covers it, too."""
    return Resource(ResourceKind.PCHANNEL, pchannel_of(vchannel)), Resource(ResourceKind.VCHANNEL, vchannel)


_ANY: Final = (Role.READ, Role.PRODUCE)
_READ: Final = (Role.READ,)
_PRODUCE: Final = (Role.PRODUCE,)
_OPERATE: Final = (Role.OPERATE,)
_ADMIN: Final = (Role.ADMIN,)

CALL_REQUIREMENTS: Final[Mapping[str, Requirement]] = {
    "ping": Requirement(_ANY, Scope.ANYTHING, description="check that the server is alive"),
    "names": Requirement(_ANY, Scope.ANYTHING, description="list the PChannels' names"),
    "open": Requirement(_ANY, Scope.ANYTHING, description="check that a PChannel exists"),
    "do_get": Requirement(_READ, ResourceKind.PCHANNEL, "pchannel", "read the log itself, with all VChannels"),
    "describe": Requirement(_READ, ResourceKind.PCHANNEL, "pchannel", "show the begin, end and bytes of a log"),
    "ends": Requirement(_READ, Scope.EVERYTHING, description="show the ends of logs"),
    "groups": Requirement(_READ, Scope.EVERYTHING, description="list the log's consumer groups"),
    "group_position": Requirement(_READ, ResourceKind.GROUP, "group", "show a group's position"),
    "move_group": Requirement(_READ, ResourceKind.GROUP, "group", "move a group"),
    "clock": Requirement(_READ, Scope.EVERYTHING, description="show the clock behind the log's timestamps"),
    "verify": Requirement(_OPERATE, ResourceKind.PCHANNEL, "pchannel", "verify a log against its checksums"),
    "do_exchange": Requirement(
        _ADMIN, ResourceKind.PCHANNEL, "append", "append to the log without the checks of appends"
    ),
    "create": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "create a log"),
    "drop": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "drop a log"),
    "truncate": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "truncate a log's beginning"),
    "retain": Requirement(_ADMIN, ResourceKind.PCHANNEL, "pchannel", "remove what retention allows"),
    "drop_group": Requirement(_ADMIN, ResourceKind.GROUP, "group", "drop a group and its positions"),
    "accept_clock": Requirement(_ADMIN, Scope.EVERYTHING, description="accept the wall clock, however far it jumped"),
    "shutdown": Requirement(_ADMIN, Scope.EVERYTHING, description="stop the server"),
    "append/do_exchange": Requirement(
        _PRODUCE, Scope.ANYTHING, description="append messages; each needs a role of its own, see below"
    ),
    "append/do_get": Requirement(
        _READ,
        Scope.ANYTHING,
        description="read new messages and those of the `wal` table, of VChannels with that role; the rows of a"
        " collection or"
        " an import with that role",
    ),
    "append/history": Requirement(_READ, Scope.ANYTHING, description="show the range of a PChannel in the `wal` table"),
    "append/checkpointed": Requirement(
        _READ, Scope.ANYTHING, description="show where the changes of a collection with that role begin"
    ),
    "append/group": Requirement(
        _READ, ResourceKind.GROUP, "group", "hold a consumer group's place on a PChannel, and move the group there"
    ),
    "append/drop_group": Requirement(_ADMIN, ResourceKind.GROUP, "group", "drop a consumer group and its positions"),
    "append/assignments": Requirement(
        _ANY, Scope.ANYTHING, description="show which nodes serve the appends of which PChannels"
    ),
    "append/tick": Requirement(_ANY, Scope.ANYTHING, description="append a time tick"),
    "append/confirm": Requirement(_ANY, Scope.ANYTHING, description="wait until a tick is decided"),
    "append/mvcc": Requirement(_READ, Scope.ANYTHING, description="show how far VChannels with that role can be read"),
    "append/flow": Requirement(_ANY, Scope.ANYTHING, description="show the state of flow control"),
    "append/describe": Requirement(_READ, ResourceKind.PCHANNEL, "pchannel", "show the append host's position"),
    "append/definitions": Requirement(
        _OPERATE, ResourceKind.PCHANNEL, "pchannel", "show the chain's definitions of collections"
    ),
    "append/restart": Requirement(
        _OPERATE, ResourceKind.PCHANNEL, "pchannel", "restart a PChannel after the cause of its parking is fixed"
    ),
    "append/tombstone": Requirement(
        _ADMIN, ResourceKind.PCHANNEL, "pchannel", "inspect an entry that parks its PChannel, and replace it"
    ),
    "append/metrics": Requirement(_READ, Scope.EVERYTHING, description="read the server's metrics"),
    "append/catalog": Requirement(_ANY, Scope.ANYTHING, description="a call of the coordinator: see the next rows"),
    CATALOG_PREFIX + "term": Requirement(_ANY, Scope.ANYTHING, description="show the newest term of a PChannel"),
    CATALOG_PREFIX + "pchannels": Requirement(_ANY, Scope.ANYTHING, description="list the PChannels and their terms"),
    CATALOG_PREFIX + "next_epoch": Requirement(
        _PRODUCE, Scope.ANYTHING, description="get a new epoch for a producer's id"
    ),
    CATALOG_PREFIX + "collection": Requirement(_ANY, ResourceKind.COLLECTION, "name", "show a collection's definition"),
    CATALOG_PREFIX + "collections": Requirement(
        _ANY, Scope.ANYTHING, description="list the definitions of collections with any role"
    ),
    CATALOG_PREFIX + "create_collection": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "create a collection"),
    CATALOG_PREFIX + "create_partition": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "add a partition"),
    CATALOG_PREFIX + "add_field": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "add a field"),
    CATALOG_PREFIX + "alter": Requirement(_OPERATE, ResourceKind.COLLECTION, "name", "change the schema"),
    CATALOG_PREFIX + "flush": Requirement(
        _OPERATE, ResourceKind.COLLECTION, "name", "seal and flush the growing segments"
    ),
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
"""Who may append a message of each type. Other types need the role admin on everything."""


def authorize(
    caller: Caller,
    call: str,
    request: Mapping[str, Any] | None = None,
    *,
    calls: Mapping[str, Requirement] = CALL_REQUIREMENTS,
) -> None:
    """Check that `caller` may make a call with that request.

    Raises PermissionDenied if not, InvalidArgument if the call does not exist.
    """
    need = calls.get(call)
    if need is None:
        raise InvalidArgument(f"unknown call {call[:100]!r}")
    caller.require_valid()
    caller.principal.require_role(need.roles, need.resources(request or {}), call)


def may_see(caller: Caller, resources: Sequence[Resource]) -> bool:
    """Return whether the caller has any role on one of `resources`, and so may see their definition or messages."""
    return caller.principal.has_role(_ANY, resources)
