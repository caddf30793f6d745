"""A deployment for the tests of the command line.

A real log server and append host, and the jobs' work done in process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer.testing
from typer.main import get_command
from typer.testing import CliRunner

from millrace.base.settings import Settings
from millrace.commands.main import app
from millrace.node.flush import definition as flusher_run
from millrace.node.ingest.definition import ingest_to_end
from millrace.rpc.remote_log import RemoteLogService

typer.testing._get_command = cache(get_command)  # type: ignore[attr-defined]
"""The commands are made once a run.

CliRunner makes them for each call, and typer reads the signatures of all of them (0.2 s).
"""


@dataclass(frozen=True)
class Deployment:
    """One data folder and ways to work on it."""

    settings: Settings

    def run(self, *arguments: str, stdin: str | bytes | None = None, data: bool = True) -> Any:
        """Run ``millrace`` in this process; the result has exit_code, stdout and stderr."""
        where = ["--data", str(self.settings.data_dir)] if data else []
        return CliRunner().invoke(app, [*arguments, *where], input=stdin)

    def ok(self, *arguments: str, stdin: str | bytes | None = None) -> str:
        """Run a command that has to succeed; its stdout."""
        result = self.run(*arguments, stdin=stdin)
        assert result.exit_code == 0, (
            f"{arguments}: {result.exit_code}\n{result.stdout}\n{result.stderr}{result.exception!r}"
        )
        return str(result.stdout)

    def as_json(self, *arguments: str, stdin: str | bytes | None = None) -> Any:
        """What a command that has to succeed prints with --json."""
        return json.loads(self.ok(*arguments, "--json", stdin=stdin))

    def lines(self, *arguments: str) -> list[dict[str, Any]]:
        """The JSON lines that a command that has to succeed prints."""
        return [json.loads(line) for line in self.ok(*arguments).splitlines()]

    def fails(self, code: str, *arguments: str, stdin: str | bytes | None = None) -> str:
        """Run a command that has to fail with the error `code`; the error's words."""
        result = self.run(*arguments, stdin=stdin)
        assert result.exit_code == 1, f"{arguments}: {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.stderr
        found = result.stderr.strip().splitlines()[-1]
        assert found.startswith(f"{code}: "), found
        return str(found)

    def catch_up(self, *, flush: bool = True) -> None:
        """Do what the streaming node, and with `flush` the flusher, would do until nothing is left."""
        with RemoteLogService.connect(self.settings.log_path, start=False) as service:
            ingest_to_end(self.settings, service)
        if flush:
            flusher_run.flush_to_end(self.settings)

    def create_users(self, *options: str) -> None:
        """The collection ``users``: id, name, at."""
        fields = ("--field", "id:int64", "--field", "name:string?", "--field", "at:timestamp?", "--key", "id")
        self.ok("collections", "create", "users", *fields, *options)

    def produce(self, *rows: dict[str, Any]) -> Any:
        """Rows into ``users``."""
        return self.as_json("produce", "users", "-", stdin="\n".join(json.dumps(row) for row in rows))

    def file(self, name: str, text: str) -> Path:
        """A file beside the data folder."""
        path = self.settings.data_dir.parent / name
        path.write_text(text, encoding="utf-8")
        return path
