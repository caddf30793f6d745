"""A declaration as a file: YAML or JSON, with secrets from the environment (``${env:NAME}``) where it says so.

Only files of the machine's operator and of the service (whose keys seal the secrets) are expanded, never the input of
an API.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.flows.declare.configuration import Configuration, read_yaml, sealed
from millrace.flows.declare.connections import with_passwords
from millrace.flows.declare.flow import Flow
from millrace.flows.declare.keys import Keys
from millrace.flows.declare.part import Problem, expanded, invalid, with_secrets
from millrace.flows.declare.spellings import spelling_of


def flow_of_file(
    path: Path, configuration: Configuration, *, env: Mapping[str, str] | None = None, keys: Keys | None = None
) -> Flow:
    """Return the flow of the range loop that `path` declares, with the defaults of `configuration`.

    `keys` open what the service has sealed. Raises PipelineInvalid, InvalidSettings, SecretUnreadable.
    """
    return _with_defaults(read_declaration(path, env=env, keys=keys), configuration)


def with_defaults(flow: Flow, configuration: Configuration, *, connections: bool = True) -> Flow:
    """Return a declared flow of the range loop with the defaults of `configuration`.

    Without `connections`, references to Airflow's connections stay as they are. Raises PipelineInvalid and
    InvalidSettings.
    """
    secrets = with_passwords(flow.secrets()) if connections else flow.secrets()
    return _with_defaults(with_secrets(flow.to_json(unset=False), secrets), configuration)


def _with_defaults(declared: dict[str, Any], configuration: Configuration) -> Flow:
    spelling = spelling_of(declared)
    if spelling == "flow" and (found := Flow.parse(declared, compiled=False)).host == "spark":
        words = "runs on Spark, and a worker's file cannot declare that: list the file in flow_declarations"
        raise invalid([Problem("host", words, "host")], what=found.name)
    return Flow.parse(configuration.with_defaults(declared), spelling=spelling)


def read_declaration(path: Path, *, env: Mapping[str, str] | None = None, keys: Keys | None = None) -> dict[str, Any]:
    """Return the declaration in `path`, unchecked, with its secrets. Raises as :func:`flow_of_file`."""
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise invalid([Problem("", "is an object with id, source and sink", "type")], what=path.name)
    found: dict[str, Any] = expanded(value, env=env, unseal=None if keys is None else keys.decrypt)
    return found


def with_sealed(value: dict[str, Any], secrets: Mapping[str, str], keys: Keys) -> dict[str, Any]:
    """Return a declaration with its secrets in their places, sealed by `keys`. Raises InvalidSettings."""
    for path, text in secrets.items():
        place = value
        *folders, last = path.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = sealed(keys.encrypt(text))
    return value
