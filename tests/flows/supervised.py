"""A supervisor of a flow in a process of its own, over small real children.

    python -m tests.flows.supervised PROGRAM [--attempts N] [--seconds-silent …]

PROGRAM is what each child runs; it is formatted with `log`, a file in which it says what it did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from millrace.base.errors import MillraceError, StreamBusy
from millrace.base.settings import Settings
from millrace.flows.supervisor import Restarts, supervise
from millrace.runtime.child_processes import ChildProcess
from millrace.runtime.process_setup import stop_on_signals
from millrace.runtime.supervisor import Fault

RUN_ID: Final = "flow-small"
_ALONE: Final = """
import fcntl, os, signal, sys, threading, time
log = open({log!r}, "a", buffering=1)
held = open({log!r} + ".held", "w")
try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    log.write("two at once\\n")
"""
_WATCHED: Final = """
from millrace.runtime.child_processes import SupervisorWatch
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
SupervisorWatch(os.getppid(), stop, patience={patience}).start()
log.write("began\\n")
stop.wait()
log.write("ended\\n")
"""
PROGRAMS: Final = {
    "well": _ALONE + _WATCHED,
    "hangs": _ALONE + _WATCHED + "threading.Event().wait()",
    "deaf": _ALONE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); log.write('began\\n'); time.sleep(600)",
    "dies": _ALONE + "print('no room', file=sys.stderr); sys.exit(3)",
    "parent": _ALONE
    + """
import subprocess
below = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
log.write(f"below {{below.pid}}\\n")
time.sleep(600)
""",
    "typed": _ALONE
    + """
import json
told = {{"code": "INVALID_STREAM", "message": "no such column", "retriable": False}}
open({result!r}, "w").write(json.dumps({{"ok": False, "error": told}}))
sys.exit(1)
""",
}


class SmallHost:
    """One child of a program, which may be paused by a file."""

    name, run_id, count, bounded = "small", RUN_ID, 1, False

    def __init__(self, data: Path, program: str, *, attempts: int | None, patience: float) -> None:
        self._data, self._program, self._patience = data, program, patience
        self.restarts = Restarts(0.1, 0.4, attempts=attempts)

    def wanted(self) -> tuple[str, ...] | None:
        return None if (self._data / "paused").exists() else ("small",)

    def command(self, number: int, result: Path) -> list[str]:
        given = {"log": str(self._data / "said"), "patience": self._patience, "result": str(result)}
        return [sys.executable, "-c", PROGRAMS[self._program].format(**given)]

    def log_file(self, number: int) -> Path:
        return self._data / "log"

    def watch(self, number: int, job: ChildProcess) -> Callable[[], Fault | None]:
        return lambda: None

    def ended(self) -> None: ...

    def busy(self, words: str) -> MillraceError:
        return StreamBusy(words)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--attempts", type=int)
    parser.add_argument("--patience", type=float, default=60.0)
    options = parser.parse_args()
    settings = Settings.load()
    host = SmallHost(settings.data_dir, options.program, attempts=options.attempts, patience=options.patience)
    stop = stop_on_signals()
    try:
        ended = supervise(settings, host, stop)
    except MillraceError as error:
        print(json.dumps({"code": error.code, "message": str(error)}))
        sys.exit(9)
    print(json.dumps({"code": ended.code, "error": ended.error, "pid": os.getpid()}))


if __name__ == "__main__":
    main()
