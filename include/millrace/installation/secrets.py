"""The secrets of one installation: generated once into two files that only their owner can read, and never logged.

``secrets.json`` holds the keys that Airflow's processes share. They have no defaults, and every task fails unless all
processes have the same keys. ``passwords.json`` is Airflow's own file of users and passwords: edit it to change the
password.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from millrace.base.errors import InvalidSettings
from millrace.base.files import replace_json

SECRETS_FILE: Final = "secrets.json"
PASSWORDS_FILE: Final = "passwords.json"
USER: Final = "admin"


@dataclass(frozen=True, repr=False)
class Secrets:
    """The keys of Airflow's processes, and the password of the one user."""

    fernet_key: str
    jwt_secret: str
    api_secret_key: str
    password: str

    def environment(self, state: Path) -> dict[str, str]:
        """Return the secrets as Airflow's environment variables; `state` is the folder they were loaded from."""
        return {
            "AIRFLOW__CORE__FERNET_KEY": self.fernet_key,
            "AIRFLOW__API_AUTH__JWT_SECRET": self.jwt_secret,
            "AIRFLOW__API__SECRET_KEY": self.api_secret_key,
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(state / PASSWORDS_FILE),
        }


def load_secrets(state: Path) -> Secrets:
    """Return the secrets in the folder `state`; generate missing ones.

    Raises InvalidSettings if a file is damaged.
    """
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    keys = _read(state / SECRETS_FILE)
    if not keys:
        keys = {
            "fernet_key": base64.urlsafe_b64encode(os.urandom(32)).decode(),
            "jwt_secret": secrets.token_urlsafe(64),
            "api_secret_key": secrets.token_urlsafe(32),
        }
        _write(state / SECRETS_FILE, keys)
    passwords = _read(state / PASSWORDS_FILE)
    if USER not in passwords:
        passwords[USER] = secrets.token_urlsafe(12)
        _write(state / PASSWORDS_FILE, passwords)
    wanted = {each.name for each in fields(Secrets)} - {"password"}
    if set(keys) != wanted or not all(isinstance(value, str) and value for value in keys.values()):
        raise InvalidSettings(f"{state / SECRETS_FILE} is damaged: {_CURE}")
    return Secrets(**keys, password=str(passwords[USER]))


_CURE: Final = "restore it from a copy, or remove it (connections that Airflow stored encrypted are then unreadable)"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    path.chmod(0o600)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidSettings(f"{path} is damaged: {_CURE}")
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace the file atomically; it is never readable by other users."""
    replace_json(path, value, synced=True)
