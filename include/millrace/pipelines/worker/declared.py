"""A declaration as a file of the operator's: YAML or JSON, with secrets from the environment (``${env:NAME}``) where it says so.

For files that the machine's own operator wrote; what comes through an API is never expanded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import InvalidSettings
from millrace.pipelines.model.configuration import Configuration, read_yaml
from millrace.pipelines.model.part import Problem, invalid
from millrace.pipelines.model.pipeline import Pipeline

_FROM: Final = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def read_pipeline(path: Path, configuration: Configuration, *, env: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline that `path` declares, with the defaults of `configuration`. Raises PipelineInvalid, InvalidSettings."""
    return Pipeline.parse(configuration.with_defaults(read_declaration(path, env=env)))


def read_declaration(path: Path, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `path` declares, not checked yet, secrets in their places. Raises PipelineInvalid, InvalidSettings."""
    value = read_yaml(path)
    if not isinstance(value, dict):
        raise invalid([Problem("", "is an object with id, source and sink", "type")], what=path.name)
    found: dict[str, Any] = _expanded(value, os.environ if env is None else env)
    return found


def _expanded(value: Any, env: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        found = _FROM.fullmatch(value)
        if found is None:
            return value
        if found[1] not in env:
            raise InvalidSettings(f"{value}: the environment has no {found[1]}")
        return env[found[1]]
    if isinstance(value, dict):
        return {name: _expanded(each, env) for name, each in value.items()}
    if isinstance(value, list):
        return [_expanded(each, env) for each in value]
    return value
