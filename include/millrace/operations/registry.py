"""Lookup of operations: those that the folders of this package declare, and those that other packages register.

A folder's `declaration.py` holds :class:`~millrace.operations.operation.Operation` values; there is no central list.
Another package registers its operations with an entry point:

    [project.entry-points."millrace.operations"]
    my_report = "my_package.declaration:MY_REPORT"
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import millrace.operations
from millrace.base.entry_points import load_entry_points
from millrace.base.errors import InvalidArgument
from millrace.operations.operation import Operation
from millrace.runtime.launch.command import JobSpec, module_job, script_job

GROUP: Final = "millrace.operations"


def operations() -> dict[str, Operation]:
    """Return every operation by name.

    Raises InvalidArgument if two operations share a name, and InvalidSettings if an entry point is invalid.
    """
    return _by_name([*_built_in().values(), *load_entry_points(GROUP, Operation)])


def find_operation(name: str) -> Operation:
    """Return the operation `name`. Raises InvalidArgument, which lists the known names, if there is none."""
    # Look at the built-in operations first: a third-party package that fails to load must not stop them.
    known = found if name in (found := _built_in()) else operations()
    if name not in known:
        raise InvalidArgument(f"unknown operation {name!r}; the operations are {', '.join(sorted(known))}")
    return known[name]


def find_job(name: str) -> JobSpec:
    """Return what a launcher starts as `name`: an operation, or a file of jobs/.

    Raises InvalidArgument, which lists the known names, if there is none.
    """
    if name in _built_in() or name in (known := operations()):
        return module_job(name, "millrace.operations", name)
    return script_job(name, others=known)


def _built_in() -> dict[str, Operation]:
    """Return what ``millrace.operations.<folder>.declaration`` modules declare."""
    folders = [each.name for each in pkgutil.iter_modules(millrace.operations.__path__) if each.ispkg]
    names = [f"millrace.operations.{folder}.declaration" for folder in folders]
    modules = [import_module(name) for name in names if find_spec(name) is not None]
    return _by_name([each for module in modules for each in vars(module).values() if isinstance(each, Operation)])


def _by_name(found: list[Operation]) -> dict[str, Operation]:
    known = {each.name: each for each in found}
    if twice := {each.name for each in found if known[each.name] is not each}:
        raise InvalidArgument(f"several operations are named {', '.join(sorted(twice))}: rename all but one")
    return known
