"""The jars of a broker: every jar of its lock file, pinned by digest, without transitive resolution.

``python -m millrace.brokers.jars kafka pulsar`` fetches them ahead of time (:mod:`millrace.runtime.jars`).
"""

from __future__ import annotations

import sys
from importlib.resources import files

from millrace.base.settings import Settings
from millrace.runtime.jars import Jar, exit_code, locked_jars, parse_lock


def read_lock(name: str) -> tuple[Jar, ...]:
    """Return the jars that ``<name>.lock`` in this folder lists."""
    return parse_lock(_lock(name), name)


def broker_jars(name: str, settings: Settings, *, deadline: float = 300) -> list[str]:
    """Return the paths of the jars of broker `name` ("kafka", ...); fetch those that the cache lacks.

    Raises InvalidSettings or DeadlineExceeded, as :func:`millrace.runtime.jars.fetch_jars` does.
    """
    return locked_jars(_lock(name), name, settings, deadline=deadline)


def _lock(name: str) -> str:
    return (files("millrace.brokers") / f"{name}.lock").read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: [broker_jars(broker, Settings.load(), deadline=900) for broker in sys.argv[1:]]))
