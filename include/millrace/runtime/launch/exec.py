"""The first instruction of a launched job: say who it is, then become the job.

    python -m millrace.runtime.launch.exec IDENTITY_FILE COMMAND...

It leaves its starter for a session of its own first, so that it is nobody's child and leaves no zombie. The process id and
the start time outlive the exec, so the record is true for the job itself; it is written by the job's own process, so it is
there whenever the job is, even where the starter was killed in between.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from millrace.base.data_folder import restrict_umask
from millrace.base.process import current_process


def main() -> None:
    """Leave the starter, write the identity record and exec the command."""
    restrict_umask()
    if os.fork():
        os._exit(0)
    os.setsid()
    identity, command = Path(sys.argv[1]), sys.argv[2:]
    draft = identity.with_name(f".{identity.name}")
    me = current_process()
    record = {"pid": me.pid, "start": me.start, "at": time.time(), "command": command}
    draft.write_text(json.dumps(record))
    draft.replace(identity)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
