"""A writer of an event store that may be killed at any instant. It notes, synced, what it asks for and what it is told.

    python sourcing_writer.py <journal file> <seed>

The data folder comes from the environment (MILLRACE_DATA). A line of the journal is JSON:

    {"tried": id, "key": key, "expected": version or null, "amounts": of its events}
    {"done": id, "version": version}
    {"lost": id, "current": version}    a conflict: nothing was appended

A writer first sends again what it tried last and was not told about, with the same id and expected version.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID, uuid4

from millrace.base.errors import AppendRejected, MillraceError, VersionConflict
from millrace.client.database import connect
from millrace.streams.sourcing.aggregate import Aggregate
from millrace.streams.sourcing.events import EventTypes
from millrace.streams.sourcing.groups import Command
from millrace.streams.sourcing.store import EventStore

KEYS = 12
EVERY = 10
"""Events between snapshots."""
TYPES = EventTypes()


@TYPES.register()
@dataclass
class Paid:
    amount: int


@dataclass(frozen=True)
class Account:
    payments: int = 0
    trail: int = 0
    """A hash of the amounts in their order."""


def after(state: Account, event: Paid) -> Account:
    return Account(state.payments + 1, (state.trail * 31 + event.amount) % (1 << 61))


ACCOUNTS = Aggregate(events=TYPES, initial=Account, fold=after)


def note(journal: TextIO, **line: Any) -> None:
    journal.write(json.dumps(line) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def tell(journal: TextIO, commands: list[Command], outcomes: list[Any]) -> None:
    for command, outcome in zip(commands, outcomes, strict=True):
        if isinstance(outcome, VersionConflict):
            note(journal, lost=command.id.hex, current=outcome.current_version)
        elif isinstance(outcome, MillraceError):
            raise outcome
        else:
            note(journal, done=command.id.hex, version=outcome.version)


def unresolved(path: Path) -> Iterator[Command]:
    """Commands with an expected version that no line says more about."""
    lines = lines_of(path)
    told = {each.get("done") or each.get("lost") for each in lines}
    for line in lines:
        if "tried" in line and line["tried"] not in told and line["expected"] is not None:
            events = [Paid(amount) for amount in line["amounts"]]
            yield Command(line["key"], events, line["expected"], UUID(line["tried"]))


def main() -> None:
    """Append until killed: single commands and batches, with an expected version and without, and decisions."""
    path, chance = Path(sys.argv[1]), random.Random(sys.argv[2])
    os.nice(5)
    with connect() as database, open(path, "a", encoding="ascii") as journal:
        store = EventStore.open(database, "accounts", ACCOUNTS, vchannels=2, snapshot_every=EVERY, cache=KEYS // 2)
        known: dict[str, int] = {}
        waiting = list(unresolved(path))
        while True:
            commands = waiting
            if not commands:
                for _ in range(chance.choice([1, 1, 5])):
                    key = f"a{chance.randrange(KEYS)}"
                    events = [Paid(chance.randrange(1000)) for _ in range(chance.choice([1, 1, 3]))]
                    expected = None if chance.random() < 0.2 else known.get(key, 0)
                    commands.append(Command(key, events, expected, uuid4()))
                    known[key] = known.get(key, 0) + len(events)
                for each in commands:
                    amounts = [event.amount for event in each.events]
                    note(journal, tried=each.id.hex, key=each.key, expected=each.expected_version, amounts=amounts)
            try:
                outcomes = store.append_all(commands)
            except MillraceError as error:
                if not error.retriable:
                    raise
                waiting = [each for each in commands if each.expected_version is not None]
                continue
            waiting = []
            assert not any(isinstance(each, AppendRejected) for each in outcomes), outcomes
            tell(journal, commands, outcomes)
            for command, outcome in zip(commands, outcomes, strict=True):
                current = outcome.current_version if isinstance(outcome, VersionConflict) else outcome.version
                known[command.key] = current
            if chance.random() < 0.2:
                key = f"a{chance.randrange(KEYS)}"
                identity = uuid4()
                note(journal, tried=identity.hex, key=key, expected=None, amounts=[7])
                try:
                    done = store.execute(key, lambda state: [Paid(7)], command=identity)
                except MillraceError as error:
                    if not error.retriable and not isinstance(error, VersionConflict):
                        raise
                    continue  # it may have taken effect, or not
                note(journal, done=identity.hex, version=None)
                known[key] = done.version


if __name__ == "__main__":
    main()
