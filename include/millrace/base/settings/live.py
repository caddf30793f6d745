"""Settings that may change while Millrace runs: values that lie over those of the environment and the file.

They are in one file of the data folder, which every process of the machine looks at before it uses a setting
(:class:`LiveSettings`). In a cluster, the meta store has the truth, and nodes and coordinators copy it into the file of
their machine (millrace.coord.machine.settings). Only the settings that are declared as live may be in it: their users
ask for the value each time. Values are text, as in the environment.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from millrace.base.errors import InvalidSettings, UnsupportedVersion
from millrace.base.files import make_folder, replace_file
from millrace.base.settings import LIVE, Settings, parse_setting

FILE_VERSION: Final = 1
"""Version of the file and of the meta store's entry. A newer one is not read."""
LOOK_SECONDS: Final = 1.0
"""Time for which a value is used before the file is checked again."""

_log = logging.getLogger(__name__)


def live_settings_path(settings: Settings) -> Path:
    """Return the file with the changed settings of this machine."""
    return settings.data_dir / "coord" / "settings.json"


@dataclass(frozen=True, slots=True)
class ChangedSettings:
    """Changed settings, by name, as text."""

    values: Mapping[str, str]
    changed_at: float = 0.0
    """Time of the last change, in Unix seconds."""

    def encode(self) -> bytes:
        """Return the form in the file and in the meta store."""
        return json.dumps({"form": FILE_VERSION, "at": self.changed_at, "values": dict(self.values)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Invert :meth:`encode`. Raises UnsupportedVersion, InvalidSettings."""
        try:
            found = json.loads(data)
            form, at, values = int(found["form"]), float(found["at"]), dict(found["values"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidSettings(f"the changed settings are damaged ({error!r}): set them again") from error
        if form > FILE_VERSION:
            raise UnsupportedVersion(
                f"the changed settings have version {form}, and this build reads {FILE_VERSION}: use a newer build"
            )
        return cls({str(name): str(text) for name, text in values.items()}, at)

    def applied_to(self, settings: Settings) -> Settings:
        """Return `settings` with these values over them.

        Raises InvalidSettings for a setting that is not live, a value that is not allowed, and values that exclude one
        another.
        """
        wrong = sorted(self.values.keys() - LIVE)
        if wrong:
            raise InvalidSettings(
                f"{wrong[0]} does not change while Millrace runs: set it in the environment or the settings file, and"
                f" restart; those that do are {', '.join(sorted(LIVE))}"
            )
        return replace(settings, **{name: parse_setting(name, text) for name, text in self.values.items()})


def read_changed(settings: Settings) -> ChangedSettings:
    """Return the changed settings of this machine. Raises InvalidSettings, UnsupportedVersion."""
    try:
        return ChangedSettings.decode(live_settings_path(settings).read_bytes())
    except FileNotFoundError:
        return ChangedSettings({})


def write_changed(settings: Settings, changed: ChangedSettings) -> bool:
    """Replace this machine's file, unless it says the same; return whether it was replaced."""
    path, data = live_settings_path(settings), changed.encode()
    try:
        if path.read_bytes() == data:
            return False
    except FileNotFoundError:
        make_folder(path.parent)
    replace_file(path, data, synced=True)
    return True


class LiveSettings:
    """The current settings of a process, for those of its parts that ask each time.

    A value that this build does not accept (another build's, or one that conflicts with this process's environment) is
    left out with a warning: the process goes on with its own value.
    """

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = self._current = settings
        self._clock = clock
        self._looked = float("-inf")
        self._seen: Any = None
        self._warned = ""

    def current(self) -> Settings:
        """Return the settings; the same object while nothing has changed. Looks at the file once a second at most."""
        now = self._clock()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._look()
        return self._current

    def _look(self) -> None:
        try:
            found = live_settings_path(self._base).stat()
            seen: Any = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:
            seen = None
        if seen == self._seen:
            return
        before = self._current
        try:
            changed = read_changed(self._base)
        except (InvalidSettings, UnsupportedVersion, OSError) as error:
            if str(error) != self._warned:  # once, not at each look
                _log.warning("the changed settings cannot be read, and stay as they were: %s", error)
            self._warned = str(error)
            return
        self._seen, self._warned = seen, ""
        self._current = self._accepted(changed)
        for name in sorted(LIVE):
            old, new = getattr(before, name), getattr(self._current, name)
            if old != new:
                _log.info("the setting %s is %s now; it was %s", name, new, old)

    def _accepted(self, changed: ChangedSettings) -> Settings:
        accepted: dict[str, str] = {}
        made = self._base
        for name, text in changed.values.items():
            try:
                made = ChangedSettings(accepted | {name: text}).applied_to(self._base)
            except InvalidSettings as error:
                _log.warning("a changed setting is left out: %s", error)
            else:
                accepted[name] = text
        return made
