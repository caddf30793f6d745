"""How a question to a process apart ends without an answer."""

from __future__ import annotations

from millrace.base.errors import MillraceError


class TooMuchWork(MillraceError):
    """What somebody's steps do with a document, or to be checked, has no end within the bounds of a service; it was ended, and nothing else was
    touched. ``limit`` says which bound: ``time``, ``memory``, ``depth``, ``answer``, ``crash``; ``where`` what it was at. Make the step, or the
    document, smaller."""

    def __init__(self, message: str, *, limit: str, where: str = "") -> None:
        super().__init__(message)
        self.limit, self.where = limit, where


class ServiceBusy(MillraceError):
    """The service does as much of this kind at once as it does at all: nothing was done. Try again."""

    retriable = True
