"""Who may do what: a principal has roles, each over resources that patterns name. The one model of the project.

Pure values: where principals come from (files of tokens, Airflow's users) and what a service's calls need is declared elsewhere
(:mod:`millrace.access.token_file`, :mod:`millrace.access.permissions`), by this model and no other. What no grant allows is refused.

A resource is a kind and a name: ``collection:users``, ``pchannel:dml_0``, ``vchannel:dml_0_7v1``. A pattern is the same with
``*``, ``?`` and ``[...]`` in the name as in a shell; without a kind it is a collection's, and ``*`` alone is the whole deployment.
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
"""Patterns of one grant."""
_LONGEST: Final = 255


class Role(StrEnum):
    """What somebody may do, from little to everything."""

    READ = "read"
    """Read logs, messages and positions."""
    PRODUCE = "produce"
    """Append row changes and transactions."""
    OPERATE = "operate"
    """Read, produce, change the catalog, look after PChannels; nothing that destroys."""
    ADMIN = "admin"
    """Everything: what destroys, and what goes past the chain's doors."""

    @property
    def implied_roles(self) -> frozenset[Role]:
        """The roles that it includes."""
        return _HELD[self]


_HELD: Final = {
    Role.READ: frozenset({Role.READ}),
    Role.PRODUCE: frozenset({Role.PRODUCE}),
    Role.OPERATE: frozenset({Role.READ, Role.PRODUCE, Role.OPERATE}),
    Role.ADMIN: frozenset(Role),
}


class ResourceKind(StrEnum):
    """What a resource is. A PChannel stands for its VChannels too, a collection for its own."""

    COLLECTION = "collection"
    PCHANNEL = "pchannel"
    VCHANNEL = "vchannel"
    GROUP = "group"
    """A consumer group of the log."""
    PIPELINE = "pipeline"
    """A pipeline of the pipeline service."""


class Resource(NamedTuple):
    """One thing by its name."""

    kind: ResourceKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class Grant:
    """A role over what the patterns `on` name. Raises InvalidArgument for what is no pattern."""

    role: Role
    patterns: tuple[str, ...] = (EVERYTHING,)

    def __post_init__(self) -> None:
        if not 1 <= len(self.patterns) <= MAX_PATTERNS:
            raise InvalidArgument(
                f"a grant has 1 to {MAX_PATTERNS} patterns of what it is for, not {len(self.patterns)}"
            )
        object.__setattr__(self, "patterns", tuple(_pattern(text) for text in self.patterns))

    def covers(self, resource: Resource) -> bool:
        """Whether it is for that resource."""
        return any(
            text == EVERYTHING
            or (text.startswith(f"{resource.kind}:") and fnmatchcase(resource.name, text.partition(":")[2]))
            for text in self.patterns
        )


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody by name, with grants."""

    name: str
    grants: tuple[Grant, ...]

    @classmethod
    def admin(cls, name: str) -> Self:
        """Somebody who may do everything."""
        return cls(name, (Grant(Role.ADMIN),))

    def has_role(self, roles: Iterable[Role], resources: Sequence[Resource] | None = None) -> bool:
        """Whether one of `roles` is granted over one of `resources` (None: over anything at all; none: over everything)."""
        wanted = frozenset(roles)
        return any(
            not wanted.isdisjoint(grant.role.implied_roles)
            and (resources is None or EVERYTHING in grant.patterns or any(map(grant.covers, resources)))
            for grant in self.grants
        )

    def require_role(self, roles: Sequence[Role], resources: Sequence[Resource] | None, what: str) -> None:
        """:meth:`has`, or PermissionDenied that says what is missing for `what`."""
        if self.has_role(roles, resources):
            return
        where, on = ("on anything" if resources is None else "on the whole deployment"), ""
        if resources:
            where, on = f"on {resources[-1]}"[:_LONGEST], f" --on {quote(str(resources[-1]))}"[:_LONGEST]
        raise PermissionDenied(
            f"{self.name[:_LONGEST]!r} has not the role {' or '.join(roles)} {where}, which {what} needs: ask whoever runs the deployment"
            f" for a token that has (millrace tokens add NAME --role {roles[0]}{on})"
        )


def _forever() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Caller:
    """A principal behind a connection, which goes on only while what let it in is `live`."""

    principal: Principal
    key: str = ""
    """Tells callers of one principal apart that came in by different things."""
    is_valid: Callable[[], bool] = field(default=_forever, compare=False)

    def require_valid(self) -> None:
        """Raises PermissionDenied once its token was revoked or ran out."""
        if not self.is_valid():
            raise PermissionDenied(
                f"the token of {self.principal.name!r} was revoked or ran out: ask whoever runs the deployment for another"
            )


def _pattern(text: str) -> str:
    """A pattern in full. Raises InvalidArgument."""
    if text == EVERYTHING:
        return text
    kind, colon, name = text.partition(":")
    if not colon:
        kind, name = ResourceKind.COLLECTION, text
    if kind not in ResourceKind.__members__.values() or not name or len(name) > _LONGEST or not name.isprintable():
        raise InvalidArgument(
            f"{text[:80]!r} is no pattern of resources: write * for everything, NAME or collection:NAME for collections,"
            f" pchannel:NAME, vchannel:NAME, group:NAME or pipeline:NAME, with *, ? and [...] in the name (at most {_LONGEST} characters)"
        )
    return f"{kind}:{name}"


LOCAL_ADMIN: Final = Caller(Principal.admin("machine"))
"""Whoever has the machine's own tokens: those of ``server.json`` and of the environment."""
