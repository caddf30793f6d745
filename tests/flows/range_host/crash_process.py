"""A worker over the lines of a folder, whose sink ends the process at some records: ``crash_process.py FOLDER N...``.

What the sink takes is in the file ``taken``, letters are in ``letters``; both are durable before the position moves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import IO, Any

from millrace.flows.batch import Batch
from millrace.flows.records import Failure
from millrace.flows.sinks.sink import Verdicts
from tests.flows.range_host.lines import LinesFlow, numbers


def main() -> None:
    """Run to the end of the files."""
    folder, poison = Path(sys.argv[1]), set(map(int, sys.argv[2:]))
    with (folder / "taken").open("a") as taken, (folder / "letters").open("a") as letters:

        def write(batch: Batch) -> Verdicts:
            mine = numbers(batch)
            if poison & set(mine):
                os.kill(os.getpid(), signal.SIGKILL)
            _put(taken, mine)
            return Verdicts(acknowledged=len(mine))

        def letter(failure: Failure) -> None:
            number = json.loads(failure.record.value or b"")["n"]
            _put(letters, [{"n": number, "kind": failure.kind, "attempts": failure.attempts}])

        LinesFlow(folder, write, letter=letter, errors={"tries": 2}).run()


def _put(file: IO[str], found: list[Any]) -> None:
    file.writelines(json.dumps(each) + "\n" for each in found)
    file.flush()


if __name__ == "__main__":
    main()
