"""One deployment's log over the backends that have held it: the one place where a log is opened.

    service = open_deployment_log(settings.log_path, settings.log)

Ids are those of the whole log: the ledger of generation g is ``g << 48`` plus the backend's own, so ids stay ordered
and unique across a switch, and those of the first generation equal the backend's. A read continues in the next
generation where the log ended in the previous one; entries after that end in the old backend are not part of the log.
An append goes to the newest generation of its PChannel. The list is checked before (its stat) and after it, so that
an append that a switch overtook raises LogUnavailable and is never acknowledged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from millrace.base.closeable import Closeable
from millrace.base.errors import ChannelExists, ChannelNotFound, InvalidArgument, LogUnavailable, MillraceError
from millrace.base.log_backends import backend_of, is_in_data_folder
from millrace.log.clock import LogClock, log_clock
from millrace.log.generations.generation_file import GenerationFile, Generations, GenerationSpan, span_of
from millrace.log.generations.log import GenerationLog, backend_position, log_position
from millrace.log.generations.shared_list import SharedList
from millrace.log.group_leases import LeasesInProcess
from millrace.log.protocol import LogService
from millrace.log.registry import open_read_only, open_service
from millrace.message.ids import EARLIEST, LogId, generation_start
from millrace.message.log_entries import LogDescription

OpenBackend = Callable[[str], LogService]
"""Opens the backend at a URL of the registry."""

_MAX: Final = 1 << 63
_log = logging.getLogger(__name__)


def open_deployment_log(
    folder: Path,
    url: str = "",
    *,
    settings: Mapping[str, object] | None = None,
    embedded: bool = True,
    read_only: bool = False,
    shared: SharedList | None = None,
) -> GenerationsService:
    """Open the log of the deployment with log folder `folder` and setting `log` = `url` ("", "rocksmq": embedded).

    `settings` are those of that backend. If the log was switched, the list in the folder decides. Opens the newest
    backend at once and others on first use.
    `shared` is the list of a deployment whose tables lie in a store (millrace.log.generations.shared_list).
    Without `embedded`, no embedded log is opened, since only one process can have it: after a switch to one, calls
    raise LogUnavailable until the caller goes to the log server. With `read_only` as well, it is opened for reading
    while no process has it.
    Raises InvalidSettings if `url` is in no generation, LogCorrupted, and the backend's errors.
    """
    options = dict(settings or {})
    named = backend_of(url)

    def open_backend(target: str) -> LogService:
        backend = backend_of(target)
        if not embedded and backend.local:
            raise LogUnavailable("the log was switched to an embedded one: use the log server")
        if read_only and backend.local:
            return open_read_only(target, server_folder=folder)
        return open_service(target, options if backend == named else {})

    return GenerationsService(folder, url, open_backend=open_backend, shared=shared)


def backend_url(folder: Path, url: str, generation: int) -> str:
    """Return the registry URL of a generation. The embedded log of a later generation has its own folder in
    `folder`.
    """
    if not is_in_data_folder(url):
        return url
    place = folder if generation == 0 else folder / f"generation-{generation}"
    return f"{url}://{quote(str(place.absolute()))}"


class GenerationsService(LeasesInProcess, Closeable):
    """A LogService over generations. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        url: str = "",
        *,
        open_backend: OpenBackend = open_service,
        shared: SharedList | None = None,
    ) -> None:
        self.file = GenerationFile(folder, url, shared=shared)
        self._open_backend = open_backend
        self._lock = threading.RLock()
        self._backends: dict[int, LogService] = {}
        self._closed = False
        self.backend(self.file.generations.newest)

    def backend(self, generation: int) -> LogService:
        """Return the service of one generation, whose positions are its own."""
        found = self._backends.get(generation)
        if found is not None and not self._closed:
            return found
        with self._lock:
            if self._closed:
                raise LogUnavailable("this log service is closed: open it again")
            found = self._backends.get(generation)
            if found is None:
                url = backend_url(self.file.folder, self.file.generations.items[generation].url, generation)
                found = self._backends[generation] = self._open_backend(url)
            return found

    @property
    def clock(self) -> LogClock | None:
        """The clock that stamps the newest generation; None if a broker does."""
        return log_clock(self.backend(self.file.generations.newest))

    # The LogService protocol

    def create(self, pchannel: str) -> None:
        """Create an empty log in the newest generation.

        Raises ChannelExists.
        """
        generations = self.file.refresh()
        if pchannel in self.names():
            raise ChannelExists(f"channel {pchannel!r} exists already")
        if generations.knows(pchannel):
            self.file.change(lambda list_: list_.without(pchannel))
        self.file.ensure_written()  # before there is data that settings of another location would miss
        self.backend(generations.newest).create(pchannel)
        if self.file.refresh().newest != generations.newest:
            self._settle_creation(pchannel, generations.newest)

    def _settle_creation(self, pchannel: str, made_in: int) -> None:
        """Drop a log that was created while the backend was switched, if the switch had passed its generation already.

        Otherwise the switch moves it like any other. Raises LogUnavailable if it was dropped.
        """
        if self.file.generations.items[made_in].closed and self.file.generations.span(pchannel) is None:
            self.backend(made_in).drop(pchannel)
            raise LogUnavailable(f"the log was switched to another backend meanwhile: create {pchannel!r} again")

    def open(self, pchannel: str) -> GenerationLog:
        """Return a handle on an existing log.

        Raises ChannelNotFound.
        """
        self.file.refresh()
        span = self.span(pchannel)
        log = GenerationLog(self, pchannel)
        log.backend_log(span.current)  # that backend may recover now, or raise that the log does not exist
        return log

    def names(self) -> list[str]:
        """Return the PChannels, sorted. A switched log exists in its newest generation, so closed backends are not
        queried.
        """
        generations = self.file.refresh()
        return sorted({name for number in generations.open_generations() for name in self.backend(number).names()})

    def drop(self, pchannel: str) -> None:
        """Drop a log in every generation.

        Raises ChannelNotFound.
        """
        generations = self.file.refresh()
        if pchannel not in self.names():
            raise ChannelNotFound(f"channel {pchannel!r} does not exist: create it first")
        known = generations.span(pchannel)
        oldest = known.origin if known is not None else generations.open_generations()[0]
        for number in range(generations.newest, oldest - 1, -1):
            try:
                self.backend(number).drop(pchannel)
            except ChannelNotFound:
                pass
            except MillraceError as error:
                if known is None or number >= known.current or not error.retriable:
                    raise
                _log.warning("generation %d of %s must be removed by hand: %s", number, pchannel, error)
        if self.file.refresh().knows(pchannel):
            self.file.change(lambda list_: list_.without(pchannel))

    def groups(self) -> list[str]:
        """Return the consumer groups, sorted."""
        return sorted({group for number in self._retained_generations() for group in self.backend(number).groups()})

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """Return a group's position in a log; None if it never moved there.

        Raises ChannelNotFound.
        """
        self.file.refresh()
        span, begun = self.span(pchannel), None
        for number in range(span.current, span.first - 1, -1):
            found = self.backend(number).group_position(group, pchannel)
            if found is None:
                continue
            if found > EARLIEST or number == span.origin:
                return log_position(found, number, origin=span.origin)
            begun = begun or generation_start(number)  # moved back before this generation, or never past its beginning
        return begun

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """Move a group, durably, forward or back.

        Raises ChannelNotFound, InvalidArgument, LogUnavailable.
        """
        if not (0 <= position.ledger < _MAX and 0 <= position.entry < _MAX):
            raise InvalidArgument(f"{position} is not a position of a log")
        self.file.refresh()
        span = self.span(pchannel)
        number = max(position.generation, span.origin)
        if number > span.current:
            raise InvalidArgument(
                f"the log of {pchannel} has no position {position}: it is in generation {span.current}"
            )
        at = backend_position(position) if position.generation == number else EARLIEST
        if at == EARLIEST and number > span.first:
            number, at = number - 1, span.ends[number - 1]
        self.backend(number).move_group(group, pchannel, at)
        for newer in range(number + 1, span.current + 1):
            if self.backend(newer).group_position(group, pchannel) not in (None, EARLIEST):
                self.backend(newer).move_group(group, pchannel, EARLIEST)

    def drop_group(self, group: str) -> None:
        """Remove a group with all its positions."""
        for number in self._retained_generations():
            self.backend(number).drop_group(group)

    def close(self) -> None:
        """Close the backends and their handles. Idempotent."""
        with self._lock:
            self._closed = True
            backends, self._backends = list(self._backends.values()), {}
        for backend in backends:
            backend.close()

    # For handles, and for the switch

    def span(self, pchannel: str, generations: Generations | None = None) -> GenerationSpan:
        """Return where a PChannel's log is, by the list as last read.

        Raises ChannelNotFound.
        """
        generations = generations or self.file.generations
        if generations.span(pchannel) is not None:
            return span_of(generations, pchannel, found=0)
        takes = generations.open_generations()
        for number in takes[:-1]:
            if pchannel in self.backend(number).names():
                return span_of(generations, pchannel, found=number)
        return span_of(generations, pchannel, found=takes[-1])

    def describe_sealed(self, generation: int, pchannel: str) -> LogDescription | None:
        """Describe a PChannel's log in an older generation; None if that cannot be queried."""
        try:
            log = self.backend(generation).open(pchannel)
        except MillraceError as error:
            _log.warning("generation %d of %s cannot be looked at: %s", generation, pchannel, error)
            return None
        try:
            return log.describe()
        except MillraceError as error:
            _log.warning("generation %d of %s cannot be looked at: %s", generation, pchannel, error)
            return None
        finally:
            log.close()

    def _retained_generations(self) -> range:
        """Return the generations in which any PChannel may have data."""
        generations = self.file.refresh()
        spans = [generations.span(name) for item in generations.items for name in item.ends]
        oldest = min([*generations.open_generations(), *(span.first for span in spans if span is not None)])
        return range(oldest, generations.newest + 1)
