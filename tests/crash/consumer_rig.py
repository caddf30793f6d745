"""Processes that consume one group, each of which writes what it does to a file of its own, before it acknowledges.

So the files say what was processed, when and by whom, whatever became of the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from millrace.message.schema import CollectionSchema, FieldSpec

SCHEMA = CollectionSchema((FieldSpec("id", "int64", False), FieldSpec("body", "string", True)), "id")
ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 60.0


class ConsumerProcesses:
    """The processes, by name. Their program is a function `main(data folder, file)` of a test's module.

    The program ends once the data folder has a file `stop`.
    """

    program: str
    """``module:function``."""

    def __init__(self, folder: Path) -> None:
        self.data, self._out = folder / "data", folder / "out"
        self._out.mkdir()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._read: dict[str, int] = {}

    def start(self, *names: str) -> None:
        module, _, function = self.program.partition(":")
        for name in names:
            out = self._out / name
            out.touch()
            code = f"from {module} import {function}; {function}({str(self.data)!r}, {str(out)!r})"
            env = {**os.environ, "PYTHONPATH": f"{ROOT / 'include'}:{ROOT}", **self.environment()}
            self.running[name] = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)

    def environment(self) -> dict[str, str]:
        """Variables that the processes have beside this one's."""
        return {}

    def new_lines(self, name: str) -> list[str]:
        """Return the whole lines that a process wrote since the last call."""
        with open(self._out / name, "rb") as file:
            file.seek(self._read.get(name, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[name] = self._read.get(name, 0) + len(whole)
        return whole.decode().splitlines()

    def stop(self) -> None:
        (self.data / "stop").touch()
        for each in self.running.values():
            if each.poll() is None:
                each.send_signal(signal.SIGCONT)
                try:
                    each.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    each.kill()
