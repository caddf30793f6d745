"""The run of a flow: continuous or by a schedule, what keeps its worker running, and the worker's limits."""

from __future__ import annotations

from calendar import monthrange
from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator

from millrace.flows.declare.part import Part, words

AIRFLOW: Final = "airflow"
"""The deployment of a worker that a DAG keeps running."""
CONTINUOUS: Final = "continuous"
"""The schedule of a flow that always runs."""

_CRON: Final = (
    ("minute", 0, 59, ""),
    ("hour", 0, 23, ""),
    ("day", 1, 31, ""),
    ("month", 1, 12, "jan feb mar apr may jun jul aug sep oct nov dec"),
    ("weekday", 0, 7, "sun mon tue wed thu fri sat"),
)
"""Each field of a cron expression: its name, its smallest and largest value, and names of values from the smallest."""
_PRESETS: Final = ("@hourly", "@daily", "@weekly", "@monthly", "@yearly")
_LEAP_YEAR: Final = 2024


def check_schedule(text: str) -> str:
    """Return `text` if it is a valid schedule. Raises ValueError that says what is wrong."""
    if text == CONTINUOUS or text in _PRESETS:
        return text
    fields = text.lower().split()
    if len(fields) != len(_CRON):
        raise ValueError(
            f"is {CONTINUOUS}, one of {', '.join(_PRESETS)}, or a cron expression of minute, hour, day, month and"
            " weekday, such as '0 2 * * *'"
        )
    values = [_values(field, *known) for field, known in zip(fields, _CRON, strict=True)]
    _, _, days, months, _ = values
    # Cron runs on a day that fits either field, if both are given.
    if fields[4] == "*" and min(days) > max(monthrange(_LEAP_YEAR, month)[1] for month in months):
        raise ValueError(f"no month of {fields[3]!r} has a day {fields[2]}, so it would never run")
    return text


def _values(field: str, name: str, low: int, high: int, names: str) -> set[int]:
    """Return the values of a field of a cron expression. Raises ValueError."""
    known = {each: low + place for place, each in enumerate(names.split())}
    found: set[int] = set()
    for each in field.split(","):
        span, _, step = each.partition("/")
        ends = [known.get(end, int(end) if end.isascii() and end.isdigit() else -1) for end in span.split("-")]
        if span == "*":
            ends = [low, high]
        elif len(ends) > 2 or ends != sorted(ends) or not all(low <= end <= high for end in ends):
            raise ValueError(f"the {name} {each!r} is not {low} to {high}, a range such as {low}-{high}, or *")
        if "/" in each and not (step.isascii() and step.isdigit() and 0 < int(step) <= high):
            raise ValueError(f"the {name} {each!r} has no step of 1 to {high}, such as */2")
        last = high if step and len(ends) == 1 else ends[-1]
        found.update(range(ends[0], last + 1, int(step or 1)))
    return found


Schedule: TypeAlias = Annotated[str, AfterValidator(check_schedule)]


class Recovery(Part):
    """A task that failed is started again by the supervisor."""

    interval_minutes: float = words(
        "watchWorkersIntervalMin: first pause before a failed task starts again", default=5, ge=0.001, le=1440
    )
    factor: float = words("factor by which each pause is longer than the last", default=2, ge=1, le=10)
    longest_minutes: float = words("longest pause", default=60, ge=0.001, le=10_080)
    attempts: int = words(
        "failed recoveries in a row before the task stays failed; 0: no recovery", default=10, ge=0, le=10_000
    )


class Resources(Part):
    """The workers, and the limits of each."""

    cpus: float = words("cores", default=1, ge=0.1, le=256)
    memory_mib: int = words("memory", default=1024, ge=128, le=1 << 20)
    tasks: int = words("ranges that run at once; 0: one for each core", default=0, ge=0, le=1024)
    workers: int = words(
        "worker processes on this machine; several for topics require source.assignment: group",
        default=1,
        ge=1,
        le=64,
    )
