"""Waiting for what happens beside a test: looked at until it holds, and failing in words where it does not in time."""

from __future__ import annotations

from collections.abc import Callable

from millrace.base import deadline


def until(condition: Callable[[], object], what: str = "what was waited for", *, seconds: float = 60.0) -> None:
    """Wait for `condition`; `what` is said where it never comes true."""
    held = deadline.poll_until(condition, deadline.Deadline.after(seconds), interval=0.02)
    assert held, f"never came true in {seconds:g} s: {what}"
