"""The requirements of calls on their callers, and of message types on their producers.

The calls themselves are in the registry of the server that has them (:mod:`millrace.rpc.calls`; the routes of the
service). A call that is not in the registry is denied to everybody.
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


class Scope(Enum):
    """The scope of a requirement that names no resource."""

    ANYTHING = "anything"
    """A role on any resource is enough: the call concerns no resource, or checks its parts one by one."""
    EVERYTHING = "everything"
    """The role on the whole deployment."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A call's requirement on its caller: one of `roles` on the resource that the request names.

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


ANY_ROLE: Final = (Role.READ, Role.PRODUCE)
"""Roles for calls that every principal may make: each principal has one of them, or a role that includes one."""

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
    **{kind: Requirement((Role.ADMIN,), Scope.EVERYTHING) for kind in BEHAVIOUR},
    **{kind: Requirement((Role.PRODUCE,), ResourceKind.VCHANNEL) for kind in _ROWS},
    MessageType.MANUAL_FLUSH: Requirement((Role.OPERATE,), ResourceKind.VCHANNEL),
}
"""Roles that may append a message of each type. Other types need the role admin on everything."""


def authorize(
    caller: Caller, call: str, request: Mapping[str, Any] | None = None, *, calls: Mapping[str, Requirement]
) -> None:
    """Check that `caller` may make a call of the registry `calls` with that request.

    Raises PermissionDenied if not, InvalidArgument if the call does not exist.
    """
    need = calls.get(call)
    if need is None:
        raise InvalidArgument(f"unknown call {call[:100]!r}")
    caller.require_valid()
    caller.principal.require_role(need.roles, need.resources(request or {}), call)


def may_see(caller: Caller, resources: Sequence[Resource]) -> bool:
    """Return whether the caller has any role on one of `resources`, and so may see their definition or messages."""
    return caller.principal.has_role(ANY_ROLE, resources)
