"""PostgreSQL: one server on the loopback interface, with one superuser "millrace" and logical decoding.

The user's password is generated once and stored in the data folder, readable by its owner only (`credentials`).
PostgreSQL refuses to run as root. If root starts it, it runs as the user `postgres`, which Debian's package makes. That
user reaches its tables by an open folder, since the folders above them may be root's alone.
"""

from __future__ import annotations

import os
import pwd
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

from millrace.base.errors import InvalidSettings
from millrace.base.extras import import_optional
from millrace.brokers.programs import find_program
from millrace.brokers.server import STOP_SECONDS, LocalServer

USER: Final = "millrace"
DATABASE: Final = "postgres"

_FOLDER: Final = "server"
_TABLES: Final = "tables"
_SECRET: Final = "password"
_ACCOUNTS: Final = ("postgres", "nobody")
_INSTALL_SECONDS: Final = 120.0
_OPENED: Final = "OPENED-FOLDER"
_UNPRIVILEGED: Final = (
    "import ctypes, os, signal, sys\n"
    "folder = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECTORY)\n"
    "os.set_inheritable(folder, True)\n"
    "os.chdir('/')\n"
    "if os.geteuid() == 0:\n"
    "    owner = os.fstat(folder)\n"
    "    os.setgroups([])\n"
    "    os.setgid(owner.st_gid)\n"
    "    os.setuid(owner.st_uid)\n"
    "    ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # a change of the user cleared it
    "    os.getppid() == int(sys.argv[1]) or sys.exit('the starter is gone')\n"
    f"command = [each.replace('{_OPENED}', f'/proc/self/fd/{{folder}}') for each in sys.argv[3:]]\n"
    "os.execv(command[0], command)\n"
)
"""Becomes the command, as the owner of the folder, which the command reaches by an open file."""


class PostgresCredentials(NamedTuple):
    """The login of a client."""

    username: str
    password: str


class PostgresServer(LocalServer):
    """A PostgreSQL over the folder `data`. `properties` are parameters of its configuration."""

    port_names = ("client",)
    heap = ""

    @property
    def url(self) -> str:
        """The URL of its database, without the login (`credentials`)."""
        return f"postgresql://{self.address}/{DATABASE}"

    @property
    def credentials(self) -> PostgresCredentials:
        """The login of a superuser."""
        return PostgresCredentials(USER, (self.data / _FOLDER / _SECRET).read_text(encoding="utf-8").strip())

    def ready(self) -> bool:
        """Return whether it accepts queries, which it does not while it recovers."""
        psycopg = import_optional("psycopg")
        user, password = self.credentials
        try:
            psycopg.connect(
                host="127.0.0.1",
                port=self.port["client"],
                user=user,
                password=password,
                dbname=DATABASE,
                connect_timeout=2,
            ).close()
        except psycopg.OperationalError:
            return False
        return True

    def prepare(self) -> list[str]:
        folder = self.data / _FOLDER
        if not (folder / _TABLES / "postgresql.conf").exists():
            self._install(folder)
        command = [find_program("postgres", "postgres"), "-D", f"{_OPENED}/{_TABLES}"]
        for name, value in self._configuration().items():
            command += ["-c", f"{name}={value}"]
        return _unprivileged(folder, command)

    def stop(self, *, deadline: float = STOP_SECONDS) -> None:
        """Stop it cleanly without waiting for its clients; SIGKILL after `deadline` seconds. Idempotent."""
        if self.running():
            os.kill(self.pid, signal.SIGINT)  # its SIGTERM waits until the last client has left
        super().stop(deadline=deadline)

    def _install(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        secret = folder / _SECRET
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        if os.geteuid() == 0:
            account = _account()
            for path in (secret, folder):
                os.chown(path, account.pw_uid, account.pw_gid)
        command = [find_program("postgres", "initdb"), "-D", f"{_OPENED}/{_TABLES}", f"--username={USER}"]
        command += ["--auth=scram-sha-256", f"--pwfile={_OPENED}/{_SECRET}", "--no-sync", "--no-locale"]
        command += ["--encoding=UTF8"]
        done = subprocess.run(
            _unprivileged(folder, command), capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
        if done.returncode:
            raise InvalidSettings(
                f"PostgreSQL's tables cannot be created in {folder}: {(done.stdout + done.stderr)[-1000:]}"
            )

    def _configuration(self) -> dict[str, str]:
        return {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port["client"]),
            "unix_socket_directories": "",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "wal_level": "logical",
            "max_replication_slots": "20",
            "max_wal_senders": "20",
            "shared_buffers": "32MB",
            "max_wal_size": "256MB",
            "jit": "off",
            "dynamic_shared_memory_type": "mmap",  # nothing is left in /dev/shm after a SIGKILL
            # Committed transactions survive its SIGKILL, but not a power loss.
            "fsync": "off",
        } | self._properties


def _account() -> Any:
    for name in _ACCOUNTS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise InvalidSettings(f"PostgreSQL does not run as root, and there is no user {' or '.join(_ACCOUNTS)}: add one")


def _unprivileged(folder: Path, command: list[str]) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _UNPRIVILEGED, str(os.getpid()), str(folder), *command]
