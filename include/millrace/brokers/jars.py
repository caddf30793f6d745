"""The jars of a broker, by its lock file: every one listed, pinned by digest, none transitive (millrace.runtime.jars
fetches them).

``python -m millrace.brokers.jars kafka pulsar`` fetches them ahead of time.
"""

from __future__ import annotations

import hashlib
import sys
from importlib.resources import files

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.runtime.jars import Jar, exit_code, fetch_jars


def read_lock(name: str) -> tuple[Jar, ...]:
    """The jars that ``<name>.lock`` beside this module lists: `organisation name version sha256` a line."""
    text = (files("millrace.brokers") / f"{name}.lock").read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            parts = line.split()
            if len(parts) != 4:
                raise InvalidSettings(f"{name}.lock: {line!r} is not `organisation name version sha256`")
            found.append(Jar(*parts))
    return tuple(found)


def broker_jars(name: str, settings: Settings, *, deadline: float = 300) -> list[str]:
    """Paths of the jars of broker `name` ("kafka", ...); fetched first where the cache lacks one.

    Raises InvalidSettings or DeadlineExceeded, as :func:`millrace.runtime.jars.fetch_jars` says.
    """
    jars = read_lock(name)
    # A lock that changed is another folder, so that an older checkout keeps its own.
    digest = hashlib.sha256("".join(jar.sha256 for jar in jars).encode()).hexdigest()[:12]
    folder = settings.cache_dir / "jars" / f"{name}-{digest}"
    return fetch_jars(jars, folder, what=f"the jars of {name}", ivy_settings=settings.ivy_settings, deadline=deadline)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: [broker_jars(broker, Settings.load(), deadline=900) for broker in sys.argv[1:]]))
