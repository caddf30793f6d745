"""What is closed at the end of its ``with`` (or ``async with``) block, said once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """Makes a class with `close` a context manager of itself."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what this holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncCloseable(ABC):
    """Makes a class with an awaitable `close` an asynchronous context manager of itself."""

    __slots__ = ()

    @abstractmethod
    async def close(self) -> None:
        """Release what this holds."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
