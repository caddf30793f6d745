"""Commands, and the groups of them that are one message of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID, uuid4

from millrace.base.errors import MillraceError
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.streams.sourcing.states import Known

S = TypeVar("S")

EVENT_SCHEMA: Final = CollectionSchema(
    (
        FieldSpec("aggregate", "string", False),
        FieldSpec("version", "int64", False),
        FieldSpec("type", "string", False),
        FieldSpec("type_version", "int32", False),
        FieldSpec("data", "json", False),
        FieldSpec("command", "uuid", False),
        FieldSpec("at", "timestamp", False),
        FieldSpec("metadata", "json", True),
    ),
    "aggregate",
    event_time="at",
)
"""The columns of an event collection. The field types need chain version 4, as conditional appends do."""

MAX_MESSAGES: Final = 1_000
"""Aggregates in one entry of the log."""
MAX_ENTRY_BYTES: Final = 4 << 20
"""JSON of the events in one entry of the log; a command with more is an entry of its own."""


@dataclass(frozen=True, slots=True)
class Command:
    """Events to append to one aggregate, at once or not at all.

    Without an `expected_version`, they follow whatever the aggregate has. A command with the `id` of one that took
    effect changes nothing and gets its outcome, if the expected version is that command's.
    """

    key: str
    events: Sequence[Any]
    expected_version: int | None = None
    id: UUID = field(default_factory=uuid4)
    at: datetime | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    erases: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The outcome of a command: the aggregate's version after it."""

    key: str
    version: int
    tick: int
    """The tick at which the events became visible; of a repeated command, one after it."""
    repeated: bool = False
    """Whether the command had been appended before, and this call appended nothing."""


@dataclass(slots=True)
class Encoded:
    """A command with its events as types, versions and JSON, and its metadata as JSON."""

    command: Command
    events: list[tuple[str, int, str]]
    metadata: str | None
    size: int
    tried: int | None = None
    """The version after which it was sent last. Its answer may be lost, and then it has taken effect."""
    outcome: Appended | MillraceError | None = None


@dataclass(slots=True)
class Group(Generic[S]):
    """Commands that follow each other on an aggregate."""

    key: str
    begin: Known[S]
    alone: bool = False
    """Whether it must be a message of its own: together with others it was refused."""
    commands: list[Encoded] = field(default_factory=list)
    start: int = field(init=False)
    """The aggregate's version before them. Beyond `begin`, if commands of other threads are before them."""
    version: int = field(init=False)
    """The aggregate's version after them."""
    size: int = 0
    ids: set[UUID] = field(default_factory=set)
    """The ids of the commands."""
    snapshot: dict[str, Any] | None = None
    """The snapshot that is due after them, once they are appended."""

    def __post_init__(self) -> None:
        self.start = self.version = self.begin.version

    def takes(self, one: Encoded) -> bool:
        """Return whether a command may follow the others in their message."""
        return not self.commands or not (
            self.alone
            or one.command.erases
            or self.commands[-1].command.erases
            or self.size + one.size > MAX_ENTRY_BYTES
            or one.command.id in self.ids
        )

    def takes_all(self, other: Group[S]) -> bool:
        """Return whether the commands of another thread may follow in this one's message."""
        return (
            not other.alone
            and other.begin.version == self.begin.version
            and self.size + other.size <= MAX_ENTRY_BYTES
            and all(each.command.expected_version is None and self.takes(each) for each in other.commands)
        )

    def restart(self) -> None:
        """Let the commands follow `begin` directly, and nothing else."""
        commands, self.commands, self.size = self.commands, [], 0
        self.start = self.version = self.begin.version
        for each in commands:
            self.add(each)

    def add(self, one: Encoded) -> None:
        one.tried = self.version
        self.commands.append(one)
        self.ids.add(one.command.id)
        self.version += len(one.events)
        self.size += one.size
