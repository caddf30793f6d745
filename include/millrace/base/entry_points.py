"""What other packages register with Millrace: objects by entry point (``[project.entry-points."<group>"]``)."""

from __future__ import annotations

from typing import TypeVar

from millrace.base.errors import InvalidSettings

T = TypeVar("T")


def load_entry_points(group: str, kind: type[T]) -> list[T]:
    """The objects that installed packages register in `group`.

    Looks through the installed packages' metadata (some ten milliseconds), so ask where nothing nearer is found. Raises
    InvalidSettings that names the entry point where one does not load, or is no `kind`.
    """
    from importlib.metadata import entry_points  # takes as long as the rest of a command that needs none

    found = []
    for point in entry_points(group=group):
        try:
            loaded = point.load()
        except Exception as error:
            raise InvalidSettings(
                f"the entry point {point.name} = {point.value} ({group}) does not load: {error}"
            ) from error
        if not isinstance(loaded, kind):
            raise InvalidSettings(f"the entry point {point.name} = {point.value} ({group}) is no {kind.__name__}")
        found.append(loaded)
    return found
