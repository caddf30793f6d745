"""Map optional libraries to the extra that installs each of them, and report a missing one.

pyproject.toml defines the extras; a test compares them with the package's imports.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from millrace.base.errors import InvalidSettings

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "airflow": ("airflow", "great_expectations"),
    "avro": ("fastavro",),
    "coord": ("alembic", "fastapi", "httpx", "pymysql", "sqlalchemy", "starlette", "uvicorn"),
    "demo": ("duckdb_extension_delta",),
    "kafka": ("confluent_kafka", "kafka"),
    "objects": ("boto3", "obstore"),
    "operations": ("duckdb",),
    "pandas": ("pandas",),
    "polars": ("polars",),
    "pipelines": ("cel", "cryptography", "jsonschema_rs", "msgspec", "opensearchpy", "urllib3", "watchfiles"),
    "postgres": ("psycopg",),
    "pulsar": ("_pulsar", "pulsar"),
    "spark": ("delta", "pyspark", "sqlglot"),
    "streams": (),
    "yaml": ("yaml",),
    "zeromq": ("zmq",),
}
"""Modules by the extra that installs them; an extra that includes another lists only its own."""


def missing_extra_error(error: ModuleNotFoundError) -> InvalidSettings | None:
    """Return the error to raise for a failed import; None if no extra installs the module."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return None if extra is None else _not_installed(module, extra)


def import_optional(module: str) -> Any:
    """Import a library that an extra installs. Raises InvalidSettings, with the extra, if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra_error(error) or error from None


def require_extras(*extras: str) -> None:
    """Check that the modules of `extras` are installed, before a program that imports them is started.

    Raises InvalidSettings if one is missing.
    """
    for extra in extras:
        require_modules(*EXTRAS[extra])


def require_modules(*modules: str) -> None:
    """Check that the top-level `modules`, each of an extra, are installed. Raises InvalidSettings if one is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise _not_installed(module, next(extra for extra, names in EXTRAS.items() if module in names))


def _not_installed(module: str, extra: str) -> InvalidSettings:
    return InvalidSettings(f"{module} is not installed: pip install 'millrace[{extra}]'")
