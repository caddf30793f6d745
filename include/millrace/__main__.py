"""``millrace`` and ``python -m millrace``: the command line as a process, from its signals to its exit code.

It imports little before it installs the signal handlers, so that Ctrl-C works while the rest is imported.
"""

from __future__ import annotations

import io
import sys
from typing import NoReturn

from millrace.base.data_folder import restrict_umask
from millrace.commands.parts.interrupts import Interrupted, InterruptHandler


def main() -> NoReturn:
    """Run the command that the arguments name."""
    restrict_umask()
    # A file name may not be UTF-8: print messages about it anyway.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    interrupts = InterruptHandler()
    code: str | int | None = None
    try:
        code = _run(interrupts)
        interrupts.stop_raising()
    except Interrupted:
        pass
    if interrupts.signal is not None:
        interrupts.exit()
    sys.exit(code)


def _run(interrupts: InterruptHandler) -> str | int | None:
    """Return the command's exit code. Raises Interrupted. Other errors that a signal causes are suppressed."""
    try:
        interrupts.install()
        from millrace.commands.main import app

        app(obj=interrupts)
    except SystemExit as end:
        return end.code
    except BaseException:
        # A library may have wrapped Interrupted, or failed on a connection that the interrupt closed.
        if interrupts.signal is None:
            raise
    return None


if __name__ == "__main__":
    main()
