"""The values that the store returns, one for each row, complete and checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from millrace.access.grants import Role

STOPPED: Final = "STOPPED"
RUNNING: Final = "RUNNING"
PAUSED: Final = "PAUSED"


class Phase(StrEnum):
    """A pipeline's phase of life."""

    CREATING = "CREATING"
    """Its parts are being created, or undone because one could not be."""
    READY = "READY"
    DELETING = "DELETING"
    """Its parts are being removed."""


class PipelineRole(StrEnum):
    """A user's role on a pipeline. Each stands for a role of millrace.access."""

    OWNER = "owner"
    OPERATOR = "operator"
    VIEWER = "viewer"

    @property
    def role(self) -> Role:
        return _ROLES[self]


_ROLES: Final = {
    PipelineRole.OWNER: Role.ADMIN,
    PipelineRole.OPERATOR: Role.OPERATE,
    PipelineRole.VIEWER: Role.READ,
}


@dataclass(frozen=True, slots=True)
class Record:
    """A stored pipeline."""

    id: str
    version: int
    """The number of changes of its declaration and secrets, from 1."""
    phase: Phase
    wanted: str
    """RUNNING, PAUSED or STOPPED: the last requested state."""
    account: str
    name: str
    cpus: float
    memory_mib: int
    declaration: dict[str, Any]
    """Without secrets."""
    saga: dict[str, Any]
    """The progress of its creation or deletion (millrace.pipelines.deploy.saga)."""
    created_by: str
    created_at: float
    """Seconds since 1970."""
    changed_at: float


@dataclass(frozen=True, slots=True)
class Event:
    """A line of a pipeline's history."""

    id: int
    pipeline: str
    at: float
    who: str
    what: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Quota:
    """The limits of all of an account's pipelines; `cpus` and `memory_mib` are sums of their limits. 0 means none."""

    account: str
    pipelines: int
    cpus: float
    memory_mib: int


DEFAULT_QUOTA: Final = Quota("*", 200, 400.0, 400 << 10)
"""The quota of accounts without one."""
