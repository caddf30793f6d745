"""Errors of a request to a sandbox."""

from __future__ import annotations

from millrace.base.errors import MillraceError


class TooMuchWork(MillraceError):
    """A user's steps exceeded a limit of the service. Only that request was ended.

    ``limit`` is one of ``time``, ``memory``, ``depth``, ``answer`` and ``crash``; ``where`` is the position of the
    work. Make the step or the document smaller.
    """

    def __init__(self, message: str, *, limit: str, where: str = "") -> None:
        super().__init__(message)
        self.limit, self.where = limit, where


class ServiceBusy(MillraceError):
    """The service already runs as many requests of this kind as it allows. Nothing was done; try again."""

    retriable = True
