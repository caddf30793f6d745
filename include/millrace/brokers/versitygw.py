"""versitygw: an S3 over a folder of this host, on the loopback interface, with keys of its own.

Objects survive its SIGKILL; it does not sync them, so a power loss may take the newest. The folder's file system must
have extended attributes. It is built once from its pinned source by Go, which checks what it fetches against Go's
checksum database.
"""

from __future__ import annotations

import http.client
import secrets
import shlex
from functools import cached_property
from pathlib import Path
from typing import Final

from millrace.base.files import make_folder
from millrace.base.settings import Settings
from millrace.brokers.programs import build_program
from millrace.brokers.server import LocalServer

VERSION: Final = "v1.8.0"
BUCKET: Final = "tables"
KEYS_FILE: Final = "environment.sh"
"""The variables of clients, to be read by a shell."""
_MODULE: Final = "github.com/versity/versitygw/cmd/versitygw"
_REGION: Final = "us-east-1"


class VersityGateway(LocalServer):
    """A versitygw over the folder `data`, with one bucket."""

    port_names = ("client",)
    heap = ""

    @property
    def url(self) -> str:
        """The URL for the setting `tables`: clients also need `client_environment`."""
        return f"s3://{BUCKET}/millrace"

    @property
    def client_environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://{self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": _REGION,
            "AWS_ACCESS_KEY_ID": "millrace",
            "AWS_SECRET_ACCESS_KEY": self._secret,
        }

    @property
    def server_environment(self) -> dict[str, str]:
        return {"ROOT_ACCESS_KEY_ID": "millrace", "ROOT_SECRET_ACCESS_KEY": self._secret}

    def ready(self) -> bool:
        """Return whether it serves requests."""
        connection = http.client.HTTPConnection(self.host, self.port["client"], timeout=2.0)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def prepare(self) -> list[str]:
        program = install_versitygw(self._settings)
        make_folder(self.data / "buckets" / BUCKET)
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.client_environment.items()]
        _write_private(self.data / KEYS_FILE, "\n".join([*lines, ""]))
        flags = {"port": self.address, "health": "/healthz", "region": _REGION} | self._properties
        return [
            str(program),
            *(f"--{name}={value}" for name, value in flags.items()),
            "posix",
            str(self.data / "buckets"),
        ]

    @cached_property
    def _secret(self) -> str:
        path = self.data / "secret"
        if not path.exists():
            _write_private(path, secrets.token_urlsafe(24))
        return path.read_text(encoding="utf-8")


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def install_versitygw(settings: Settings) -> Path:
    """Return the program in the cache folder; build it first if it is not there. Raises as `build_program` does."""
    purpose = (
        "versitygw, the S3 of this host,",
        "set MILLRACE_TABLES to a bucket of a store that you have",
    )
    return build_program(settings, _MODULE, VERSION, purpose=purpose)
