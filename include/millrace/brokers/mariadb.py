"""MariaDB: one server on the loopback interface, with one database and one user "millrace", whose password is generated
once and kept in the data folder, for its owner alone (`credentials`).

Its binary log has whole rows with the names of their columns, so that changes can be followed from it.
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
from millrace.brokers.server import LocalServer

USER: Final = "millrace"
DATABASE: Final = "millrace"

_SECRET: Final = "password"
_INSTALL_SECONDS: Final = 120.0


class MariaDbCredentials(NamedTuple):
    """What a client needs."""

    username: str
    password: str

    def environment(self) -> dict[str, str]:
        """As Millrace's processes are handed it for the meta store."""
        return {"MILLRACE_META_USERNAME": self.username, "MILLRACE_META_PASSWORD": self.password}


class MariaDbServer(LocalServer):
    """A MariaDB over the folder `data`. `properties` are lines of its section [mysqld]."""

    port_names = ("client",)
    heap = ""

    @property
    def url(self) -> str:
        """For the setting `meta_store`; what logs in is no part of it (`credentials`)."""
        return f"mariadb://{self.address}/{DATABASE}"

    @property
    def credentials(self) -> MariaDbCredentials:
        """The user that may do everything in the database, follow the binary log, and make databases."""
        return MariaDbCredentials(USER, self._password())

    @property
    def client_environment(self) -> dict[str, str]:
        return self.credentials.environment()

    @property
    def socket(self) -> Path:
        """Where the administrator logs in, as the user of the operating system who runs it."""
        return self.data / "server.sock"

    @property
    def _temporary(self) -> Path:
        """Its own: a server that starts removes temporary tables that it finds in the folder, and another one's would
        be among them."""
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
        _write(first, _users(self._password()))
        return [server, f"--defaults-file={configuration}"]

    def _install(self, folder: Path, account: str) -> None:
        command = [find_program("mariadb", "mariadb-install-db"), "--no-defaults", f"--user={account}"]
        command += [f"--datadir={folder}", f"--tmpdir={self._temporary}", "--skip-test-db"]
        command += ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={account}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
        if done.returncode:
            raise InvalidSettings(f"MariaDB's tables cannot be made in {folder}: {(done.stdout + done.stderr)[-1000:]}")

    def _configuration(self, account: str, folder: Path, first: Path) -> dict[str, str]:
        return {
            "user": account,
            "datadir": str(folder),
            "tmpdir": str(self._temporary),
            "bind-address": "127.0.0.1",
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
            # What it committed survives its SIGKILL; a power loss may take the last second.
            "innodb_flush_log_at_trx_commit": "2",
        } | self._properties

    def _password(self) -> str:
        path = self.data / _SECRET
        if not path.exists():
            _write(path, secrets.token_urlsafe(24))
        return path.read_text(encoding="utf-8")


def _users(password: str) -> str:
    """What the server runs at each start: a line is a statement."""
    return (
        f"create database if not exists {DATABASE};\n"
        f"create or replace user '{USER}'@'127.0.0.1' identified by '{password}';\n"
        f"grant all privileges on *.* to '{USER}'@'127.0.0.1';\n"
    )


def _write(path: Path, text: str) -> None:
    """A file for its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
