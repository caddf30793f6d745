"""The jars of a broker: every jar of its lock file, pinned by digest, without transitive resolution.

``python -m millrace.brokers.jars kafka pulsar`` fetches them ahead of time (:mod:`millrace.runtime.jars`).
"""

from __future__ import annotations

import hashlib
import sys
from importlib.resources import files

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.runtime.jars import Jar, exit_code, fetch_jars


def read_lock(name: str) -> tuple[Jar, ...]:
    """Return the jars that ``<name>.lock`` in this folder lists, one `organisation name version sha256` per line."""
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
    """Return the paths of the jars of broker `name` ("kafka", ...); fetch those that the cache lacks.

    Raises InvalidSettings or DeadlineExceeded, as :func:`millrace.runtime.jars.fetch_jars` does.
    """
    jars = read_lock(name)
    # The folder depends on the lock's content, so that an older checkout keeps its own jars.
    digest = hashlib.sha256("".join(jar.sha256 for jar in jars).encode()).hexdigest()[:12]
    folder = settings.cache_dir / "jars" / f"{name}-{digest}"
    return fetch_jars(jars, folder, what=f"the jars of {name}", ivy_settings=settings.ivy_settings, deadline=deadline)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: [broker_jars(broker, Settings.load(), deadline=900) for broker in sys.argv[1:]]))
