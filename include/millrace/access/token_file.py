"""The token file of a deployment: principals that authenticate by token, in ``access/tokens.json`` of the data folder.

A token is 256 random bits and is shown once, when it is created; the file holds its SHA-256. Only the owner may read or
write the file. It is replaced atomically, by one process at a time, and running servers notice the change: a revoked
token is rejected at once, and its open connections lose access within CACHE_SECONDS (the connection closes a moment
later, millrace.log.server.connections). If the file is damaged or accessible to others, no token is accepted, and an
error says so.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from millrace.access.grants import LOCAL_ADMIN, Caller, Grant, Principal, Role
from millrace.base.deadline import Deadline
from millrace.base.errors import InvalidArgument, LogBusy, MillraceError, TokenFileRefused
from millrace.base.file_lock import exclusive_lock
from millrace.base.files import make_folder, replace_file

FOLDER: Final = "access"
FILE: Final = "tokens.json"
LOCK: Final = "tokens.lock"
MAX_TOKENS: Final = 256
MAX_BYTES: Final = 4 << 20
CACHE_SECONDS: Final = 0.5
"""Time for which an open connection relies on the last read of the file."""
LOCK_SECONDS: Final = 10.0

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_VERSION: Final = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """The stored record of one token."""

    principal: Principal
    sha256: str
    created: float
    """Unix seconds."""
    expires: float | None = None

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.principal.name,
            "grants": [{"role": str(grant.role), "on": list(grant.patterns)} for grant in self.principal.grants],
            "sha256": self.sha256,
            "created": self.created,
            "expires": self.expires,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Token:
        """Invert :meth:`to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        grants = tuple(Grant(Role(each["role"]), tuple(map(str, each["on"]))) for each in document["grants"])
        expires, digest = document["expires"], document["sha256"]
        if not isinstance(digest, str) or len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
            raise ValueError("a token's SHA-256")
        return cls(
            Principal(str(document["name"]), grants),
            digest,
            float(document["created"]),
            None if expires is None else float(expires),
        )


class TokenFile:
    """The tokens of a deployment, for servers that check them and the commands that change them. Thread-safe."""

    def __init__(self, data_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = data_dir / FOLDER
        self.path = self.folder / FILE
        self._clock = clock
        self._reading = threading.Lock()
        self._looked = float("-inf")
        self._stamp: object = None
        self._tokens: dict[str, Token] = {}
        self._refused: TokenFileRefused | None = None

    # --- authentication ---

    def authenticate(self, token: str) -> Caller | None:
        """Return the caller that `token` belongs to, by the current file; None if there is none.

        Raises TokenFileRefused.
        """
        self._look()
        if self._refused is not None:
            raise TokenFileRefused(str(self._refused))
        digest = _digest(token)
        # Compare with every token, in constant time: the duration must not reveal a match.
        found = [each for each in self._tokens.values() if hmac.compare_digest(each.sha256, digest)]
        if not found or found[0].expired(self._clock()):
            return None
        return Caller(found[0].principal, digest, partial(self._live, found[0]))

    def _live(self, token: Token) -> bool:
        if time.monotonic() - self._looked > CACHE_SECONDS:
            self._look()
        return self._tokens.get(token.sha256) == token and not token.expired(self._clock())

    def _look(self) -> None:
        """Read the file again if it has changed."""
        with self._reading:
            stamp = self._stamped()
            if stamp != self._stamp:
                refused = None
                try:
                    tokens = {each.sha256: each for each in self.tokens()}
                except TokenFileRefused as error:
                    tokens, refused = {}, error
                    _log.error("no token is accepted: %s", error)
                self._tokens, self._refused, self._stamp = tokens, refused, stamp
            self._looked = time.monotonic()

    def _stamped(self) -> object:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return "none"
        except OSError as error:
            return str(error)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    # --- reading ---

    def tokens(self) -> list[Token]:
        """Return all tokens in order of creation, including expired ones. Raises TokenFileRefused."""
        try:
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise TokenFileRefused(f"{self.path} cannot be read: {error.strerror}") from error
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise TokenFileRefused(f"{self.path} is not a regular file: check it, then remove it and create new tokens")
        with os.fdopen(handle, "rb") as file:
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid != os.geteuid() or mode & 0o077:
                raise TokenFileRefused(
                    f"users other than its owner can read or write {self.path}, or another user owns it (mode"
                    f" {mode:o}): run"
                    f" chmod 600 {self.path}, then check its tokens with: millrace tokens list"
                )
            data = file.read(MAX_BYTES + 1)
        try:
            document = json.loads(data[:MAX_BYTES])
            body = document["body"]
            if isinstance(document["version"], int) and document["version"] > _VERSION:
                raise TokenFileRefused(
                    f"{self.path} has version {document['version']}, and this build reads version {_VERSION}: run the"
                    " build"
                    " that wrote it, or a newer one"
                )
            if document["version"] != _VERSION:
                raise ValueError(f"version {document['version']!r}")
            if document["crc32"] != zlib.crc32(_canonical(body)):
                raise ValueError("its checksum does not match")
            tokens = [Token.from_json(each) for each in body["tokens"]]
            if len({each.sha256 for each in tokens}) != len(tokens) or len(tokens) > MAX_TOKENS:
                raise ValueError("its number of tokens")
        except TokenFileRefused:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MillraceError) as error:
            raise TokenFileRefused(
                f"{self.path} is damaged ({error}): restore it from a copy, or remove it and create new tokens"
            ) from error
        return tokens

    # --- changes ---

    def add(self, name: str, grants: Sequence[Grant], *, expires: float | None = None) -> tuple[str, Token]:
        """Create a token. Returns it and its record.

        Raises InvalidArgument if the name is taken or there are too many tokens, TokenFileRefused, LogBusy.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name[:80]!r} is not a valid token name: use 1 to 64 letters, digits and _.@-, starting with a"
                " letter or digit"
            )
        if name == LOCAL_ADMIN.principal.name:
            raise InvalidArgument(f"{name!r} is the name of the machine's own tokens: choose another one")
        principal = Principal(name, tuple(grants))
        if not grants:
            raise InvalidArgument("a token needs at least one role")
        now = self._clock()
        if expires is not None and expires <= now:
            raise InvalidArgument("the expiry of a token must be in the future")
        token = secrets.token_urlsafe(32)
        made = Token(principal, _digest(token), now, expires)
        with self._changing() as tokens:
            if any(each.principal.name == name for each in tokens):
                raise InvalidArgument(f"a token {name!r} already exists: revoke it first, or choose another name")
            if len(tokens) >= MAX_TOKENS:
                raise InvalidArgument(f"there are {MAX_TOKENS} tokens, the maximum: revoke some")
            self._replace([*tokens, made])
        return token, made

    def revoke(self, name: str) -> Token:
        """Remove a token and return its record.

        Raises InvalidArgument if there is none with that name, TokenFileRefused, LogBusy.
        """
        with self._changing() as tokens:
            left = [each for each in tokens if each.principal.name != name]
            gone = [each for each in tokens if each.principal.name == name]
            if not gone:
                raise InvalidArgument(f"there is no token {name!r}: millrace tokens list shows those there are")
            self._replace(left)
        return gone[0]

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Lock the file and yield its tokens."""
        with self._locked():
            yield self.tokens()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        make_folder(self.folder, 0o700)
        busy = LogBusy(f"another process is changing {self.path}: try again")
        with exclusive_lock(self.folder / LOCK, deadline=Deadline.after(LOCK_SECONDS), busy=busy):
            for draft in self.folder.glob(f".{FILE}.*"):
                draft.unlink(missing_ok=True)  # left by a process that was killed with the lock
            yield

    def _replace(self, tokens: Sequence[Token]) -> None:
        self._write(self._encoded(tokens))

    def _write(self, content: bytes) -> None:
        replace_file(self.path, content, synced=True)

    @staticmethod
    def _encoded(tokens: Sequence[Token]) -> bytes:
        body = {"tokens": [each.to_json() for each in tokens]}
        return json.dumps({"version": _VERSION, "crc32": zlib.crc32(_canonical(body)), "body": body}, indent=1).encode()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
