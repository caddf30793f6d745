"""``millrace``: everything about a deployment from the command line.

Each module of this folder registers its commands, with the group `root` or with a group of theirs; here they are
imported, whichever there are. millrace.__main__ runs the program as a process.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

import millrace.commands
from millrace.commands.parts.command_line import PANELS, root

for _found in pkgutil.iter_modules(millrace.commands.__path__):
    if _found.name not in ("main", "parts"):
        import_module(f"millrace.commands.{_found.name}")

app = root
app.registered_groups.sort(key=lambda each: PANELS.index(str(each.rich_help_panel)))
app.registered_commands.sort(key=lambda each: PANELS.index(str(each.rich_help_panel)))
