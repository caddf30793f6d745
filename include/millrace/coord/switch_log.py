"""Switch a deployment's log to another backend: every PChannel continues there; nothing is lost or duplicated.

    check that the target is writable, create the PChannels' logs there
    → add the generation to the list (millrace.log.generations.generation_file): the switch is now in progress
    → per PChannel: append AlterWAL; where the chain accepts it, this generation's log ends; record that position
    → close the generation: no PChannel is left to switch

Each step is idempotent and durable before the next one begins. To complete an interrupted switch, call it again with
the same target; before its second step it has changed nothing visible. PChannels switch one by one: appends to the
others continue, and appends to the switching one fail, retriable, between its AlterWAL message and the recording of
its position. Producers repeat those with the same sequences (law 8).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from millrace.base.backoff import jittered
from millrace.base.deadline import Deadline
from millrace.base.errors import AppendRejected, ChannelExists, DeadlineExceeded, InvalidArgument, MillraceError
from millrace.base.failpoint import hit
from millrace.base.file_lock import exclusive_lock
from millrace.log.generations.generation_file import GenerationFile, Generations, same_log
from millrace.log.generations.log import backend_position
from millrace.log.generations.service import backend_url
from millrace.log.generations.shared_list import SharedList
from millrace.log.protocol import LogService
from millrace.log.registry import open_service
from millrace.message import builders
from millrace.message.ids import EARLIEST, LogId, generation_start
from millrace.message.types import MIN_CHAIN_VERSION, MessageType
from millrace.message.wire.encode import encode_entry
from millrace.wal.reasons import Reason

LOCK: Final = "switch.lock"

_PAUSE: Final = 0.02
_LEAST_VERSION: Final = MIN_CHAIN_VERSION[MessageType.ALTER_WAL]
_AGAIN: Final = frozenset({Reason.TERM_FENCED, Reason.TERM_NOT_OPENED, Reason.UNSUPPORTED_TYPE, Reason.NO_EFFECT})
"""Rejections of an AlterWAL after which the PChannel's state is read again."""


class SwitchHost(Protocol):
    """The calls of an append host that the switch uses."""

    def append_one(self, pchannel: str, entry: bytes) -> int:
        """Append one entry with one message; return its time tick.

        Raises AppendRejected.
        """
        ...

    def describe(self, pchannel: str) -> dict[str, Any]:
        """Return the state of a PChannel: `position`, `last_entry`, `term`, `chain_version`, `parked`."""
        ...


class SwitchTerms(Protocol):
    """The calls of the coordinator that the switch uses."""

    def term(self, pchannel: str) -> int: ...

    def open_term(self, name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class SwitchedChannel:
    """One PChannel: the end of its old log, the begin of its new one, and the seconds that the switch took."""

    pchannel: str
    old_end: LogId
    new_begin: LogId | None
    """None for a `dry_run`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class LogSwitch:
    """Switches the log in `folder`, whose backend the settings name as `url`. `log` is the service that all clients use
    now.
    """

    folder: Path
    url: str
    log: LogService
    host: SwitchHost
    terms: SwitchTerms
    deadline: float = 60.0
    """Seconds allowed for one PChannel."""
    open_target: Callable[[str], LogService] = open_service
    check: Callable[[], None] = lambda: None
    """Called before each step that changes something; raises if a node may be taking appends."""
    shared: SharedList | None = None
    """The list of a deployment whose tables lie in a store."""

    def run(self, to: str, *, dry_run: bool = False) -> list[SwitchedChannel]:
        """Switch every PChannel to `to`, or complete such a switch; with `dry_run`, only check whether it is possible.

        Returns an empty list if the log is there already.
        Raises InvalidArgument (another switch is in progress, or the target has such logs), InvalidSettings (`to` is
        no log), LogBusy (or `check` raised: retry when no node takes appends), DeadlineExceeded (retry), and backend
        errors.
        """
        file = GenerationFile(self.folder, self.url, shared=self.shared)
        with exclusive_lock(self.folder / LOCK, deadline=Deadline.after(1.0)):
            generations = file.refresh()
            old = generations.open_generations()[0]
            if old == generations.newest:
                if same_log(generations.items[old].url, to):
                    return []
                self.check()
                self._prepare(to, old + 1)
                if dry_run:
                    return [SwitchedChannel(name, self._end(name), None, 0.0) for name in self.log.names()]
                self.check()
                self._begin(file, to)
            elif not same_log(generations.items[-1].url, to):
                raise InvalidArgument(
                    f"a switch to {generations.items[-1].url} is in progress: complete it first, with the same command"
                )
            if dry_run:
                return [SwitchedChannel(name, self._end(name), None, 0.0) for name in self._remaining(file, old)]
            passed: list[SwitchedChannel] = []
            while left := self._remaining(file, old):  # repeats if PChannels were created meanwhile
                passed += [self._pass(file, old, name) for name in left]
            self.check()
            file.change(lambda list_: list_.with_closed(old))
            hit("switch.closed")
            known = {each.pchannel for each in passed}
            before = [
                self._switched(file, old, name, 0.0) for name in file.generations.items[old].ends if name not in known
            ]
            return sorted([*before, *passed], key=lambda each: each.pchannel)

    def _prepare(self, to: str, generation: int) -> None:
        """Create the logs at the target.

        Raises InvalidArgument if one of them has entries.
        """
        with self.open_target(backend_url(self.folder, to, generation)) as target:
            existing = set(target.names())
            for name in self.log.names():
                if name not in existing:
                    try:
                        target.create(name)
                    except ChannelExists:
                        pass
                log = target.open(name)
                end = log.end()
                log.close()
                if end != EARLIEST:
                    raise InvalidArgument(
                        f"{to} already has a log of {name}, which ends at {end}: use another location (prefix, folder)"
                    )
        hit("switch.created")

    def _begin(self, file: GenerationFile, to: str) -> None:
        since = {name: backend_position(self._end(name)) for name in self.log.names()}
        before = file.generations
        file.change(lambda list_: list_.with_next(to, since))
        hit("switch.listed")
        try:
            self.log.names()  # makes the log's server open the target, so that an error shows before anything has moved
        except MillraceError:
            file.change(lambda list_: replace(before, first=list_.first, tombstones=list_.tombstones))
            raise

    def _end(self, name: str) -> LogId:
        log = self.log.open(name)
        try:
            return log.end()
        finally:
            log.close()

    def _remaining(self, file: GenerationFile, old: int) -> list[str]:
        """Return the PChannels that have not switched yet."""
        ends, since = file.refresh().items[old].ends, file.generations.items[old].since
        # A PChannel created since may have begun in the new generation; an empty log ends at 0:0 in either.
        return [name for name in self.log.names() if name not in ends and (name in since or self._began_in(old, name))]

    def _began_in(self, old: int, name: str) -> bool:
        position = LogId(*self.host.describe(name)["position"])
        return position.generation <= old and self._end(name).generation <= old and self._end(name) != EARLIEST

    def _pass(self, file: GenerationFile, old: int, name: str) -> SwitchedChannel:
        begun = time.monotonic()
        end = Deadline.after(self.deadline)
        reach, trouble = self._end(name), ""
        while name not in file.refresh().items[old].ends:
            if end.expired():
                raise DeadlineExceeded(
                    f"{name} did not switch to the new backend within {self.deadline:.0f} s{trouble}: run the switch"
                    " again"
                )
            try:
                found = self.host.describe(name)
                position = LogId(*found["position"])
                if position.generation > old:
                    self._keep(file, old, name, found)
                elif position >= reach:
                    self._end_log(file.generations, old, name, found)
                    hit("switch.appended")
                    continue
            except AppendRejected as rejection:
                if rejection.reason not in _AGAIN:
                    raise
            except MillraceError as error:
                if not error.retriable:
                    raise
                self.check()  # its error is retriable by another run
                trouble = f" ({error.code}: {error})"
            end.pause(jittered(_PAUSE))
        self._end(name)  # the log's server must have opened the new backend before the old generation is closed
        hit("switch.passed")
        return self._switched(file, old, name, time.monotonic() - begun)

    def _end_log(self, generations: Generations, old: int, name: str, found: dict[str, Any]) -> None:
        """Append the AlterWAL message, in a term whose chain knows it."""
        if found["chain_version"] < _LEAST_VERSION or not found["term"]:
            self.check()
            self.terms.open_term(name)
        term = max(self.terms.term(name), self.host.describe(name)["term"])
        message = builders.alter_wal(term=term, generation=old + 1, log=generations.items[old + 1].url)
        self.check()
        self.host.append_one(name, encode_entry([message]))

    def _keep(self, file: GenerationFile, old: int, name: str, found: dict[str, Any]) -> None:
        """Record the end of the log in generation `old`, from the host's state. The host records it too; the first
        record counts.
        """
        last = found["last_entry"]
        if last is not None and LogId(*last).generation == old:
            end = backend_position(LogId(*last)).following()
            file.change(lambda list_: list_.with_end(old, name, end))

    def _switched(self, file: GenerationFile, old: int, name: str, seconds: float) -> SwitchedChannel:
        end = file.generations.items[old].ends[name]
        return SwitchedChannel(
            name, LogId(generation_start(old).ledger | end.ledger, end.entry), generation_start(old + 1), seconds
        )
