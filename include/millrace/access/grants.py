"""Principals, roles and grants: the only permission model of the project.

These are pure values. Where principals come from (token files, Airflow's users) and what the calls of a service need is
declared in other modules (:mod:`millrace.access.token_file`, :mod:`millrace.access.permissions`). Whatever no grant
allows is denied.

A resource is a kind and a name: ``collection:users``, ``pchannel:dml_0``, ``vchannel:dml_0_7v1``. A pattern is the same
with the shell wildcards ``*``, ``?`` and ``[...]`` in the name. Without a kind it is a collection's; ``*`` alone is the
whole deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from shlex import quote
from typing import Final, NamedTuple, Self

from millrace.base.errors import InvalidArgument, PermissionDenied

EVERYTHING: Final = "*"
MAX_PATTERNS: Final = 64
"""Maximum patterns of one grant."""
_LONGEST: Final = 255


class Role(StrEnum):
    """The rights of a principal, from least to most."""

    READ = "read"
    """Read logs, messages and positions."""
    PRODUCE = "produce"
    """Append row changes and transactions."""
    OPERATE = "operate"
    """Read, produce, change the catalog and maintain PChannels; nothing destructive."""
    ADMIN = "admin"
    """Everything, including destructive calls and those that bypass the chain's checks."""

    @property
    def implied_roles(self) -> frozenset[Role]:
        """The roles that this role includes, itself among them."""
        return _HELD[self]


_HELD: Final = {
    Role.READ: frozenset({Role.READ}),
    Role.PRODUCE: frozenset({Role.PRODUCE}),
    Role.OPERATE: frozenset({Role.READ, Role.PRODUCE, Role.OPERATE}),
    Role.ADMIN: frozenset(Role),
}


class ResourceKind(StrEnum):
    """The kind of a resource. A PChannel includes its VChannels, a collection its own."""

    COLLECTION = "collection"
    PCHANNEL = "pchannel"
    VCHANNEL = "vchannel"
    GROUP = "group"
    """A consumer group of the log."""
    PIPELINE = "pipeline"
    """A pipeline of the pipeline service."""


class Resource(NamedTuple):
    """A resource, by kind and name."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Grant:
    """A role on the resources that `patterns` match. Raises InvalidArgument if a pattern is invalid."""

    role: Role
    patterns: tuple[str, ...] = (EVERYTHING,)

    def __post_init__(self) -> None:
        if not 1 <= len(self.patterns) <= MAX_PATTERNS:
            raise InvalidArgument(f"a grant has 1 to {MAX_PATTERNS} patterns of resources, not {len(self.patterns)}")
        object.__setattr__(self, "patterns", tuple(_pattern(text) for text in self.patterns))

    def covers(self, resource: Resource) -> bool:
        """Return whether a pattern matches the resource."""
        return any(
            text == EVERYTHING
            or (text.startswith(f"{resource.kind}:") and fnmatchcase(resource.name, text.partition(":")[2]))
            for text in self.patterns
        )


@dataclass(frozen=True, slots=True)
class Principal:
    """A named user or program, with its grants."""

    name: str
    grants: tuple[Grant, ...]

    @classmethod
    def admin(cls, name: str) -> Self:
        """Return a principal that may do everything."""
        return cls(name, (Grant(Role.ADMIN),))

    def has_role(self, roles: Iterable[Role], resources: Sequence[Resource] | None = None) -> bool:
        """Return whether one of `roles` is granted on one of `resources`.

        `resources` None means any resource at all; an empty sequence means the whole deployment.
        """
        wanted = frozenset(roles)
        return any(
            not wanted.isdisjoint(grant.role.implied_roles)
            and (resources is None or EVERYTHING in grant.patterns or any(map(grant.covers, resources)))
            for grant in self.grants
        )

    def require_role(self, roles: Sequence[Role], resources: Sequence[Resource] | None, what: str) -> None:
        """Check :meth:`has_role` for the call or action `what`.

        Raises PermissionDenied, naming the missing role and resource.
        """
        if self.has_role(roles, resources):
            return
        where, on = ("on anything" if resources is None else "on the whole deployment"), ""
        if resources:
            where, on = f"on {resources[-1]}"[:_LONGEST], f" --on {quote(str(resources[-1]))}"[:_LONGEST]
        raise PermissionDenied(
            f"{self.name[:_LONGEST]!r} lacks the role {' or '.join(roles)} {where}, which {what} needs: ask the"
            " operator of the"
            f" deployment for a token with it (millrace tokens add NAME --role {roles[0]}{on})"
        )


def _forever() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal behind a connection; the connection continues only while its token `is_valid`."""

    principal: Principal
    key: str = ""
    """Distinguishes callers of one principal that use different tokens."""
    is_valid: Callable[[], bool] = field(default=_forever, compare=False)

    def require_valid(self) -> None:
        """Raise PermissionDenied if the token has been revoked or has expired."""
        if not self.is_valid():
            raise PermissionDenied(
                f"the token of {self.principal.name!r} was revoked or has expired: ask the operator for a new one"
            )


def _pattern(text: str) -> str:
    """Return a pattern with its kind. Raises InvalidArgument."""
    if text == EVERYTHING:
        return text
    kind, colon, name = text.partition(":")
    if not colon:
        kind, name = ResourceKind.COLLECTION, text
    if kind not in ResourceKind.__members__.values() or not name or len(name) > _LONGEST or not name.isprintable():
        raise InvalidArgument(
            f"{text[:80]!r} is not a pattern of resources: write * for everything, NAME or collection:NAME for"
            " collections,"
            f" pchannel:NAME, vchannel:NAME, group:NAME or pipeline:NAME, with *, ? and [...] in the name"
            f" (at most {_LONGEST} characters)"
        )
    return f"{kind}:{name}"


LOCAL_ADMIN: Final = Caller(Principal.admin("machine"))
"""The caller with the machine's own tokens: those of ``server.json`` and of the environment."""
