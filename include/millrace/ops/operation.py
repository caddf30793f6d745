"""What every operation is made of: checked parameters, a report, progress that a watcher can read.

This module imports neither Spark nor Delta: DAG files and the trigger forms are built from the parameters' classes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from millrace.errors import InvalidArgument
from millrace.message.ids import resolve_tick

MOMENT_PATTERN: Final = (
    r"^(|\d{1,19}|\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    r"([T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?)?)$"
)
"""A time tick, an ISO 8601 moment, or nothing: what a form checks before a run begins."""


def _moment(text: str) -> str:
    try:
        if text:
            resolve_tick(text)
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
    return text


Moment: TypeAlias = Annotated[str, AfterValidator(_moment), Field(json_schema_extra={"pattern": MOMENT_PATTERN})]
"""When: a time tick in digits, or a moment in ISO 8601 (without a zone: UTC); "" for none."""


class OperationParams(BaseModel):
    """Parameters of one operation: a frozen pydantic model; each field has a default or is asked for, and a description.

    The JSON schema of the class becomes the trigger form of its DAG, so `description`, `ge`/`le` and Literal values are
    what a person sees there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Check `value`. Raises InvalidArgument that names each wrong field and what it takes."""
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(str(part) for part in each['loc']) or 'parameters'}: {each['msg']}"
                for each in error.errors()
            )
            raise InvalidArgument(f"{cls.__name__}: {wrong}") from None


class OperationReport(BaseModel):
    """What an operation did, as plain data: it goes into the task's result and is shown in the UI."""

    model_config = ConfigDict(frozen=True)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class Progress:
    """Progress of a running operation in one small file, replaced whole; without a path it is kept to itself."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def say(self, words: str, *, done: float | None = None, **figures: float | int | str) -> None:
        """`words` for a person, `done` as a share of 1 where it is known, and figures by name."""
        if self._path is None:
            return
        write_json(
            self._path, {"words": words, "done": done, "figures": figures, "at": time.time(), "pid": os.getpid()}
        )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file at `path` whole: a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value))
    partial.replace(path)
