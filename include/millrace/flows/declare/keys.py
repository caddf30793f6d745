"""The keys that encrypt secrets of pipelines: from outside, or from a file in the data folder. There is no default.

``MILLRACE_PIPELINE_KEYS`` holds Fernet keys, newest first, separated by commas: the first encrypts, each decrypts.
Without it they are in the data folder's file ``access/pipelines.key``, one per line, generated at the first need and
readable by its owner only. ``MILLRACE_PIPELINE_KEYS_REQUIRED`` says that the data folder is lost with the machine or
pod, while the secrets are not: then no key is generated there.

To rotate, put a new key before the old one, run ``millrace flows service rotate-keys``, and remove the old one.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from millrace.base.errors import InvalidSettings, SecretUnreadable
from millrace.base.files import replace_file

VARIABLE: Final = "MILLRACE_PIPELINE_KEYS"
REQUIRED: Final = "MILLRACE_PIPELINE_KEYS_REQUIRED"
FILE: Final = "access/pipelines.key"


class Keys:
    """Encrypts and decrypts secrets by the keys of one place. Thread-safe; the keys are read at the first need."""

    def __init__(self, data_dir: Path, *, env: Mapping[str, str] = os.environ) -> None:
        self._path = data_dir / FILE
        self._given = env.get(VARIABLE, "")
        self._required = bool(env.get(REQUIRED, ""))

    @property
    def exist(self) -> bool:
        """Whether there are keys already."""
        return bool(self._given) or self._path.exists()

    def require_lasting(self) -> None:
        """Raise InvalidSettings if keys would be lost with the data folder, and the secrets not."""
        if self._required and not self._given:
            raise InvalidSettings(
                f"the data folder is lost with this pod, and the keys in it with all secrets: set {VARIABLE} to a key"
                " that `millrace flows service new-key` makes"
            )

    def encrypt(self, text: str) -> bytes:
        """Encrypt `text` by the first key.

        Raises InvalidSettings if a key is invalid or other users can read its file.
        """
        return self._keys(make=True).encrypt(text.encode())

    def decrypt(self, token: bytes) -> str:
        """Decrypt a secret. Raises SecretUnreadable if no present key encrypted it, and InvalidSettings."""
        try:
            return self._keys(make=False).decrypt(token).decode()
        except InvalidToken:
            raise SecretUnreadable(
                f"no key of {self._where} decrypts a secret: add the key that encrypted it after the others,"
                " or set the secret again"
            ) from None

    def rotated(self, token: bytes) -> bytes:
        """Encrypt a secret again, by the first key. Raises SecretUnreadable, InvalidSettings."""
        return self.encrypt(self.decrypt(token))

    @property
    def _where(self) -> str:
        return VARIABLE if self._given else str(self._path)

    def _keys(self, *, make: bool) -> MultiFernet:
        self.require_lasting()
        if not self._given and make and not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _generate(self._path)
        text = self._given or self._read()
        keys = [each for each in text.replace(",", "\n").split() if each]
        try:
            return MultiFernet([Fernet(each) for each in keys])
        except ValueError:
            raise InvalidSettings(
                f"{self._where} holds no Fernet keys (32 bytes in URL-safe base64 each): create one with"
                " `millrace flows service new-key`"
            ) from None

    def _read(self) -> str:
        try:
            if self._path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise InvalidSettings(f"other users can read {self._path}: set its mode to 600, and rotate the key")
            return self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            raise InvalidSettings(
                f"there is no key for the secrets of pipelines: {self._path} is missing. Restore it from a backup, set"
                f" {VARIABLE}, or set the secrets again"
            ) from None


def new_key() -> str:
    """Return a new key, for :data:`VARIABLE`."""
    return Fernet.generate_key().decode()


def _generate(path: Path) -> None:
    """Create the key file atomically, unless it exists, readable by its owner only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    replace_file(draft, new_key() + "\n", synced=True)
    try:
        with suppress(FileExistsError):  # another process was first
            os.link(draft, path)
    finally:
        draft.unlink()
