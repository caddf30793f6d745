"""Base classes for objects that are closed at the end of a ``with`` or ``async with`` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """Make a class with `close` its own context manager."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncCloseable(ABC):
    """Make a class with an awaitable `close` its own asynchronous context manager."""

    __slots__ = ()

    @abstractmethod
    async def close(self) -> None:
        """Release the resources of this object."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
