"""Load objects that other packages register by entry point (``[project.entry-points."<group>"]``)."""

from __future__ import annotations

from typing import TypeVar

from millrace.base.errors import InvalidSettings

T = TypeVar("T")


def load_entry_points(group: str, kind: type[T]) -> list[T]:
    """Return the objects that installed packages register in `group`.

    This reads the metadata of all installed packages (tens of milliseconds), so try built-in objects first.
    Raises InvalidSettings, with the entry point's name, if one does not load or is not a `kind`.
    """
    from importlib.metadata import entry_points  # slow to import, and most commands need no entry points

    found = []
    for point in entry_points(group=group):
        try:
            loaded = point.load()
        except Exception as error:
            raise InvalidSettings(
                f"the entry point {point.name} = {point.value} ({group}) does not load: {error}"
            ) from error
        if not isinstance(loaded, kind):
            raise InvalidSettings(f"the entry point {point.name} = {point.value} ({group}) is not a {kind.__name__}")
        found.append(loaded)
    return found
