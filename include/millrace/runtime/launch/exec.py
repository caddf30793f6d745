"""The first step of a launched job: record its identity, then exec the job.

    python -m millrace.runtime.launch.exec IDENTITY_FILE COMMAND...

It first leaves its starter for a session of its own, so that nobody has to reap it. Process id and start time survive
the exec, so the record is true for the job. The job's own process writes it, so it exists whenever the job does, even
if the starter was killed in between.
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
    """Detach from the starter, write the identity record and exec the command."""
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
