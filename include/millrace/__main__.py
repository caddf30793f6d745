"""``millrace``, and ``python -m millrace``: the command line as a process, from its signals to its exit code.

What it imports before the signals are taken is little, so that Ctrl-C is answered while the rest is imported.
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
    # A name of a file may be no UTF-8: what is said of it is said all the same.
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
    """The command's exit code. Raises Interrupted; what else it raises while a signal ends it is told to nobody."""
    try:
        interrupts.install()
        from millrace.commands.main import app

        app(obj=interrupts)
    except SystemExit as end:
        return end.code
    except BaseException:
        # What a library made of Interrupted, or of a connection that closed under it.
        if interrupts.signal is None:
            raise
    return None


if __name__ == "__main__":
    main()
