"""The brokers that can be started here, by name; a module is imported when its broker is asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings
from millrace.brokers.broker import Broker

KINDS: Final[dict[str, str]] = {
    "kafka": "millrace.brokers.kafka:KafkaBroker",
    "pulsar": "millrace.brokers.pulsar:PulsarBroker",
}
"""Name -> ``module:class``, each a Broker made from its data folder and the settings."""


def broker(name: str, data: Path, *, settings: Settings) -> Broker:
    """A broker over the folder `data`, not started. Raises InvalidSettings."""
    if name not in KINDS:
        raise InvalidSettings(f"there is no broker {name!r} to start; known are {', '.join(sorted(KINDS))}")
    module, _, kind = KINDS[name].partition(":")
    found: Broker = getattr(import_module(module), kind)(data, settings=settings)
    return found
