"""Passwords that are in Airflow's connections: ``${connection:ID}`` in place of a secret.

A flow that Airflow starts gets them from Airflow's secrets backend. Other flows read the variable
``AIRFLOW_CONN_<ID>``, in either of Airflow's forms: a URI or JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import unquote, urlsplit

from millrace.base.errors import InvalidSettings

_REFERENCE: Final = re.compile(r"\$\{connection:([^{}]+)\}")
_ID: Final = re.compile(r"[A-Za-z0-9_.\-]{1,200}")


def named_connection(text: str) -> str | None:
    """Return the connection that a secret refers to, or None. Raises InvalidSettings if its id is not valid."""
    found = _REFERENCE.fullmatch(text)
    if found is None:
        return None
    if _ID.fullmatch(found[1]) is None:
        raise InvalidSettings(f"{text[:100]}: an Airflow connection has letters, digits, '_', '.' and '-' in its id")
    return found[1]


def password_in_environment(connection: str, *, env: Mapping[str, str] | None = None) -> str:
    """Return the password of a connection in the environment. Raises InvalidSettings, without the value."""
    variable = f"AIRFLOW_CONN_{connection.upper()}"
    value = (os.environ if env is None else env).get(variable, "")
    if not value:
        raise InvalidSettings(
            f"${{connection:{connection}}}: only a run that Airflow starts knows Airflow's connection {connection}."
            f" Give the flow a schedule and trigger its DAG, or set the variable {variable} to the connection's URI"
            " (mariadb://user:password@host:3306/database)"
        )
    try:
        if value.lstrip().startswith("{"):
            password = json.loads(value).get("password") or ""
        else:
            password = unquote(urlsplit(value).password or "")
    except ValueError:
        raise InvalidSettings(f"{variable} is neither a connection's URI nor JSON: correct it") from None
    if not password or not isinstance(password, str):
        raise InvalidSettings(f"{variable} has no password: add one to the connection")
    return password


def with_passwords(
    secrets: Mapping[str, str], *, password_of: Callable[[str], str] = password_in_environment
) -> dict[str, str]:
    """Return secrets by path, with the passwords of connections that they refer to. Raises InvalidSettings."""
    found = {path: named_connection(text) for path, text in secrets.items()}
    return {path: text if (name := found[path]) is None else password_of(name) for path, text in secrets.items()}
