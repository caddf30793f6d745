"""Libraries that the package alone does not bring, and the extra of it that does: what is said where one is not installed.

pyproject.toml has the extras; a test holds every import of the package against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from millrace.base.errors import InvalidSettings

EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "airflow": ("airflow", "great_expectations"),
    "avro": ("fastavro",),
    "coord": ("alembic", "fastapi", "httpx", "pymysql", "sqlalchemy", "starlette", "uvicorn"),
    "kafka": ("confluent_kafka", "kafka"),
    "operations": ("duckdb",),
    "pipelines": ("cel", "cryptography", "jsonschema_rs", "msgspec", "opensearchpy", "urllib3"),
    "pulsar": ("_pulsar", "pulsar"),
    "spark": ("delta", "pandas", "pyspark"),
    "streams": ("sqlglot",),
    "yaml": ("yaml",),
}
"""By extra the modules that it is for; of an extra that takes another one in, its own alone."""


def missing_extra_error(error: ModuleNotFoundError) -> InvalidSettings | None:
    """What to say of a library that an import lacks; None where no extra brings it."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    return None if extra is None else _told(module, extra)


def require_extras(*extras: str) -> None:
    """Before a program is started that imports what `extras` bring. Raises InvalidSettings where a module of one is missing."""
    for extra in extras:
        for module in EXTRAS[extra]:
            if find_spec(module) is None:
                raise _told(module, extra)


def _told(module: str, extra: str) -> InvalidSettings:
    return InvalidSettings(f"{module} is not installed: pip install 'millrace[{extra}]'")
