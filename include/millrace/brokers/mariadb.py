"""MariaDB: one server with one database and one user "millrace", on the loopback interface or at `host`.

The user's password is generated once and stored in the data folder, readable by its owner only (`credentials`). The
binary log has full row images with column names, so that changes can be captured from it.
"""

from __future__ import annotations

import os
import pwd
import secrets
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from millrace.base.errors import InvalidSettings
from millrace.brokers.programs import find_program
from millrace.brokers.server import LOOPBACK, LocalServer

USER: Final = "millrace"
DATABASE: Final = "millrace"

_SECRET: Final = "password"
_INSTALL_SECONDS: Final = 120.0


class MariaDbCredentials(NamedTuple):
    """The login of a client."""

    username: str
    password: str

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass the login to Millrace's processes."""
        return {"MILLRACE_META_USERNAME": self.username, "MILLRACE_META_PASSWORD": self.password}


class MariaDbServer(LocalServer):
    """A MariaDB over the folder `data`. `properties` are lines of its [mysqld] section."""

    port_names = ("client",)
    heap = ""

    @property
    def url(self) -> str:
        """The URL for the setting `meta_store`, without the login (`credentials`)."""
        return f"mariadb://{self.address}/{DATABASE}"

    @property
    def credentials(self) -> MariaDbCredentials:
        """The login of a user with all rights, who may also read the binary log and create databases."""
        return MariaDbCredentials(USER, self._password())

    @property
    def client_environment(self) -> dict[str, str]:
        return self.credentials.environment()

    @property
    def socket(self) -> Path:
        """The socket on which the administrator logs in: the operating system's user who runs the server."""
        return self.data / "server.sock"

    @property
    def _temporary(self) -> Path:
        """The server's own temporary folder: at its start, a server removes temporary tables of its folder, which
        would include those of another server."""
        return self.data / "temporary"

    def prepare(self) -> list[str]:
        server, account = find_program("mariadb", "mariadbd"), pwd.getpwuid(os.geteuid()).pw_name
        folder = self.data / "tables"
        self._temporary.mkdir(mode=0o700, exist_ok=True)
        if not (folder / "mysql" / "db.frm").exists():
            self._install(folder, account)
        configuration, first = self.data / "server.cnf", self.data / "users.sql"
        lines = "".join(f"{name}={value}\n" for name, value in self._configuration(account, folder, first).items())
        _write(configuration, f"[mysqld]\n{lines}")
        _write(first, _users(self._password(), LOOPBACK if self.host == LOOPBACK else "%"))
        return [server, f"--defaults-file={configuration}"]

    def _install(self, folder: Path, account: str) -> None:
        command = [find_program("mariadb", "mariadb-install-db"), "--no-defaults", f"--user={account}"]
        command += [f"--datadir={folder}", f"--tmpdir={self._temporary}", "--skip-test-db"]
        command += ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={account}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
        if done.returncode:
            raise InvalidSettings(
                f"MariaDB's system tables cannot be created in {folder}: {(done.stdout + done.stderr)[-1000:]}"
            )

    def _configuration(self, account: str, folder: Path, first: Path) -> dict[str, str]:
        return {
            "user": account,
            "datadir": str(folder),
            "tmpdir": str(self._temporary),
            "bind-address": self.host,
            "port": str(self.port["client"]),
            "socket": str(self.socket),
            "pid-file": str(self.data / "server.pid"),
            "init-file": str(first),
            "skip-name-resolve": "ON",
            "character-set-server": "utf8mb4",
            "collation-server": "utf8mb4_bin",
            "server_id": "1",
            "log_bin": "binlog",
            "binlog_format": "ROW",
            "binlog_row_image": "FULL",
            "binlog_row_metadata": "FULL",
            "max_binlog_size": str(64 << 20),
            "max_allowed_packet": str(128 << 20),
            "innodb_buffer_pool_size": "32M",
            "innodb_log_file_size": "32M",
            "performance_schema": "OFF",
            # Committed transactions survive its SIGKILL; a power loss may lose the last second.
            "innodb_flush_log_at_trx_commit": "2",
        } | self._properties

    def _password(self) -> str:
        path = self.data / _SECRET
        if not path.exists():
            _write(path, secrets.token_urlsafe(24))
        return path.read_text(encoding="utf-8")


def _users(password: str, clients: str) -> str:
    """Return the statements, one per line, that the server runs at each start, for clients at the address `clients`."""
    return (
        f"create database if not exists {DATABASE};\n"
        f"create or replace user '{USER}'@'{clients}' identified by '{password}';\n"
        f"grant all privileges on *.* to '{USER}'@'{clients}';\n"
    )


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
