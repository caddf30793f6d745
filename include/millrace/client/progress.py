"""How far a long call is, in words: the share that is done, and about how long the rest takes."""

from __future__ import annotations

from typing import Final

MIN_SECONDS: Final = 1.0
"""Time from which on the past speed says something about the rest."""


def progress_words(done: float, total: float, seconds: float) -> str:
    """Return ``43 %, 1 min 20 s left`` for `done` of `total` units in so many `seconds`.

    Without the time left if too little is done to say. Empty if there is no total.
    """
    if total <= 0:
        return ""
    share = min(max(done / total, 0.0), 1.0)
    words = f"{int(share * 100)} %"
    if share and seconds >= MIN_SECONDS:
        words += f", {duration_words(seconds / share - seconds)} left"
    return words


def duration_words(seconds: float) -> str:
    """Return ``8 s``, ``1 min 20 s`` or ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
