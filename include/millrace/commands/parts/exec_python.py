"""A command that another program takes the place of: it gets Ctrl-C and SIGTERM itself, and its exit code is ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from millrace.base.package import ROOT
from millrace.base.settings import Settings


def exec_python(arguments: Sequence[str], settings: Settings) -> NoReturn:
    """Run Python with `arguments` in place of this process, with these settings."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    sys.stderr.flush()
    environment = os.environ | settings.environment() | {"PYTHONPATH": paths}
    os.execve(sys.executable, [sys.executable, *arguments], environment)
