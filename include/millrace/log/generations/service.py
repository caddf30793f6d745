"""One deployment's log over the backends that hold it, one after the other: the one place where a log is opened.

    service = open_deployment_log(settings.log_path, settings.log)

Ids are those of the whole log: the ledger of generation g is ``g << 48`` and the backend's own, so that ids stay ordered and
unique across a switch of the backend, and those of the first generation are the backend's own. A read passes from one
generation to the next where the log ended there; what stands behind that end in the old backend lies outside of the log. An
append goes to the newest generation of its PChannel; the list is looked at before (its stat) and again behind it, so that an
append that a switch overtook is LogUnavailable, never acknowledged.
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
from millrace.log.generations.log import GenerationLog
from millrace.log.generations.positions import backend_position, log_position
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
) -> GenerationsService:
    """The log of the deployment whose log folder is `folder` and whose setting `log` is `url` ("", "rocksmq": embedded).

    `settings` are those of that backend. Where the log was switched, the list in the folder decides. Opens the newest
    backend at once and others when they are asked for. Without `embedded` no embedded log is opened, which one process
    alone may have (with `look` it is opened for reading alone, where nobody has it): a switch to it is LogUnavailable here, until the caller goes to the log's server. Raises InvalidSettings where `url` is none of them, LogCorrupted, and
    what the backend raises where it does not open.
    """
    options = dict(settings or {})
    named = backend_of(url)

    def open_backend(target: str) -> LogService:
        backend = backend_of(target)
        if not embedded and backend.local:
            raise LogUnavailable("the log was switched to an embedded one: ask the log's server for it")
        if read_only and backend.local:
            return open_read_only(target, server_folder=folder)
        return open_service(target, options if backend == named else {})

    return GenerationsService(folder, url, open_backend=open_backend)


def backend_url(folder: Path, url: str, generation: int) -> str:
    """The registry's URL of a generation; the embedded log of a later one has a folder of its own in `folder`."""
    if not is_in_data_folder(url):
        return url
    place = folder if generation == 0 else folder / f"generation-{generation}"
    return f"{url}://{quote(str(place.absolute()))}"


class GenerationsService(Closeable):
    """A LogService over generations. Thread-safe."""

    def __init__(self, folder: Path, url: str = "", *, open_backend: OpenBackend = open_service) -> None:
        self.file = GenerationFile(folder, url)
        self._open_backend = open_backend
        self._lock = threading.RLock()
        self._backends: dict[int, LogService] = {}
        self._closed = False
        self.backend(self.file.generations.newest)

    def backend(self, generation: int) -> LogService:
        """The service of one generation, whose positions are its own."""
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
        """The clock that the newest generation stamps by, where that is its own."""
        return log_clock(self.backend(self.file.generations.newest))

    # The LogService protocol

    def create(self, pchannel: str) -> None:
        """Make an empty log in the newest generation; raises ChannelExists."""
        generations = self.file.refresh()
        if pchannel in self.names():
            raise ChannelExists(f"channel {pchannel!r} exists already")
        if generations.knows(pchannel):
            self.file.change(lambda list_: list_.without(pchannel))
        self.file.ensure_written()  # before there is anything that settings of another place would leave behind
        self.backend(generations.newest).create(pchannel)
        if self.file.refresh().newest != generations.newest:
            self._settle_creation(pchannel, generations.newest)

    def _settle_creation(self, pchannel: str, made_in: int) -> None:
        """A switch came in between: it carries the new log on as any other, unless it was done with that generation."""
        if self.file.generations.items[made_in].closed and self.file.generations.span(pchannel) is None:
            self.backend(made_in).drop(pchannel)
            raise LogUnavailable(f"the log was switched to another backend meanwhile: create {pchannel!r} again")

    def open(self, pchannel: str) -> GenerationLog:
        """A handle on an existing log; raises ChannelNotFound."""
        self.file.refresh()
        span = self.span(pchannel)
        log = GenerationLog(self, pchannel)
        log.backend_log(span.current)  # that backend may mend itself now, or say that there is no such log
        return log

    def names(self) -> list[str]:
        """The PChannels, sorted. A log that was switched exists where it goes on, so that closed backends are not asked."""
        generations = self.file.refresh()
        return sorted({name for number in generations.open_generations() for name in self.backend(number).names()})

    def drop(self, pchannel: str) -> None:
        """Destroy a log in every generation; raises ChannelNotFound."""
        generations = self.file.refresh()
        if pchannel not in self.names():
            raise ChannelNotFound(f"there is no channel {pchannel!r}: create it first")
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
                _log.warning("what generation %d holds of %s has to be removed by hand: %s", number, pchannel, error)
        if self.file.refresh().knows(pchannel):
            self.file.change(lambda list_: list_.without(pchannel))

    def groups(self) -> list[str]:
        """The consumer groups, sorted."""
        return sorted({group for number in self._kept() for group in self.backend(number).groups()})

    def group_position(self, group: str, pchannel: str) -> LogId | None:
        """Where a group stands in a log; None where it never moved there. Raises ChannelNotFound."""
        self.file.refresh()
        span, begun = self.span(pchannel), None
        for number in range(span.current, span.first - 1, -1):
            found = self.backend(number).group_position(group, pchannel)
            if found is None:
                continue
            if found > EARLIEST or number == span.origin:
                return log_position(found, number, origin=span.origin)
            begun = begun or generation_start(
                number
            )  # moved back before this generation, or never beyond its beginning
        return begun

    def move_group(self, group: str, pchannel: str, position: LogId) -> None:
        """Move a group, durably, forth or back. Raises ChannelNotFound, InvalidArgument, LogUnavailable."""
        if not (0 <= position.ledger < _MAX and 0 <= position.entry < _MAX):
            raise InvalidArgument(f"{position} is no position of a log")
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
        """Forget a group with all its positions."""
        for number in self._kept():
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
        """Where a PChannel's log lies, by the list as it was last seen. Raises ChannelNotFound."""
        generations = generations or self.file.generations
        if generations.span(pchannel) is not None:
            return span_of(generations, pchannel, found=0)
        takes = generations.open_generations()
        for number in takes[:-1]:
            if pchannel in self.backend(number).names():
                return span_of(generations, pchannel, found=number)
        return span_of(generations, pchannel, found=takes[-1])

    def describe_sealed(self, generation: int, pchannel: str) -> LogDescription | None:
        """What an older generation holds of a PChannel; None where it cannot be asked."""
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

    def _kept(self) -> range:
        """The generations that any PChannel may have something in."""
        generations = self.file.refresh()
        spans = [generations.span(name) for item in generations.items for name in item.ends]
        oldest = min([*generations.open_generations(), *(span.first for span in spans if span is not None)])
        return range(oldest, generations.newest + 1)
