"""A declaration as a file: YAML or JSON, with secrets from the environment (``${env:NAME}``) where it says so.

This is for files of the machine's operator, and for those of the service, whose secrets are sealed by its keys. What
comes through an API is never expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.flows.declare.configuration import Configuration, read_yaml
from millrace.flows.declare.keys import Keys
from millrace.flows.declare.part import Problem, expanded, invalid
from millrace.flows.declare.pipeline import Pipeline


def read_pipeline(
    path: Path, configuration: Configuration, *, env: Mapping[str, str] | None = None, keys: Keys | None = None
) -> Pipeline:
    """The pipeline that `path` declares, with the defaults of `configuration`. `keys` open what the service has sealed.

    Raises PipelineInvalid, InvalidSettings, SecretUnreadable.
    """
    return Pipeline.parse(configuration.with_defaults(read_declaration(path, env=env, keys=keys)))


def read_declaration(path: Path, *, env: Mapping[str, str] | None = None, keys: Keys | None = None) -> dict[str, Any]:
    """What `path` declares, not checked yet, secrets in their places. Raises as :func:`read_pipeline`."""
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise invalid([Problem("", "is an object with id, source and sink", "type")], what=path.name)
    found: dict[str, Any] = expanded(value, env=env, unseal=None if keys is None else keys.decrypt)
    return found
