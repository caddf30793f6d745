"""A streaming job without streams, for the tests of its supervision.

Beats, ends on SIGTERM, fails when a file says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from millrace.base.file_lock import ProcessRegistration
from millrace.base.files import replace_json
from millrace.base.settings import Settings


def main() -> None:
    """Beat twenty times a second."""
    result = Path(sys.argv[sys.argv.index("--result") + 1])
    settings = Settings.load()
    _reporter = ProcessRegistration(settings.run_path)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    fault = settings.run_path / "fail"
    query = {"message": "m", "batches": 1, "rows": 10, "rows_per_second": 1.0, "busy_seconds": 0.0, "parked": []}
    query |= {"active": True, "last_commit": time.time(), "lag_seconds": 0.1}
    while not stop.wait(0.05):
        if fault.exists():
            fault.unlink()
            error = {"code": "WAL_GAP", "message": "rows are missing", "retriable": False}
            replace_json(result, {"ok": False, "error": error})
            sys.exit(1)
        beat = {"pid": os.getpid(), "at": time.time(), "spark_ui": None, "queries": {"streaming-node": query}}
        replace_json(settings.run_path / "millrace-streaming-node.heartbeat.json", beat)
    replace_json(result, {"ok": True, "stopped": True, "report": {}})


if __name__ == "__main__":
    main()
