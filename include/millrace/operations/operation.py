"""The building blocks of an operation: its declaration, validated parameters and a report.

    BACKUP = Operation(
        name="backup", summary="Copies …", params=BackupParams, run="millrace.operations.backup.run:run"
    )

The declaration is the only description of an operation. Its job, its command, its button in the UI, and the form, role,
tags and retries of its DAG are derived from it. This module imports neither Spark nor Delta nor Airflow, and no
declaration may (tests/operations/test_declarations.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from importlib import import_module
from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from millrace.access.grants import Role
from millrace.base.errors import InvalidArgument
from millrace.flows.declare.part import Problem, problems_of
from millrace.message.ids import resolve_tick

TIME_PATTERN: Final = (
    r"^(|\d{1,19}|\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    r"([T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?)?)$"
)
"""A time tick, an ISO 8601 timestamp, or nothing. A form checks it before a run begins."""


def _check_time(text: str) -> str:
    try:
        if text:
            resolve_tick(text)
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
    return text


TimeParam: TypeAlias = Annotated[
    str, AfterValidator(_check_time), Field(json_schema_extra={"pattern": TIME_PATTERN, "format": "tick-or-date-time"})
]
"""A time tick in digits, or an ISO 8601 timestamp (UTC if it has no zone). "" means none."""


class OperationParams(BaseModel):
    """Parameters of one operation, as a frozen pydantic model.

    Every field has a description, and a default unless it is required. The JSON schema of the class becomes the trigger
    form of the DAG, which shows `description`, `ge`/`le` and Literal values to the user.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """Validate `value`. Raises InvalidArgument, which names each invalid field and what it accepts."""
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            raise InvalidArgument(cls.describe_errors(error, value)) from None

    @classmethod
    def describe_errors(cls, error: ValidationError, value: Mapping[str, Any]) -> str:
        """Describe what is wrong with `value`, field by field."""
        known = f"unknown parameter; the parameters are {', '.join(cls.model_fields)}"
        return problem_list(
            each._replace(message=known) if each.kind == "extra_forbidden" else each
            for each in problems_of(error, value)
        )


def counted(number: int, noun: str) -> str:
    """Return ``1 row`` or ``2,000 rows``, for sentences of reports."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def mebibytes(size: int) -> str:
    """Return a size in bytes for sentences of reports: ``0.4 MiB``."""
    return f"{size / (1 << 20):,.1f} MiB"


class OperationReport(BaseModel):
    """The result of an operation as plain data. It becomes the task's result, and the UI shows it."""

    model_config = ConfigDict(frozen=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if "holds" in vars(cls):
            warnings.warn(f"{cls.__name__}.holds is deprecated: name it succeeded", DeprecationWarning, stacklevel=2)
            cls.succeeded = vars(cls)["holds"]  # type: ignore[method-assign]

    @property
    def succeeded(self) -> bool:
        """Whether the operation found everything in order. If not, the command exits with code 3."""
        return True

    @property
    def sentence(self) -> str:
        """The result in one sentence, for people. Empty: the report has no such sentence."""
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, which begins with its sentence as ``summary``."""
        found = self.model_dump(mode="json")
        return {"summary": self.sentence, **found} if self.sentence else found


def problem_list(problems: Iterable[Problem]) -> str:
    """Return problems in one line, each with its field."""
    return "; ".join(f"{each.field or 'parameters'}: {each.message}" for each in problems)


OperationFunction: TypeAlias = Callable[..., OperationReport]
"""``run(settings, params, progress)``. An operation that needs Spark has ``run(spark, settings, params, progress)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The declaration of an operation, from which its job, command, form, DAG and button are derived."""

    name: str
    """Name of the job and the command: a Python identifier."""
    summary: str
    """One line that says what the operation does."""
    params: type[OperationParams]
    run: str | OperationFunction
    """``module:function``, imported when the operation runs, or the function itself if its module is light."""
    example: str = ""
    """Example options, shown in the help of the command."""
    needs_spark: bool = False
    requires: tuple[str, ...] = ()
    """Modules of optional libraries that the run imports. They are checked before Spark starts."""
    low_priority: bool = False
    """Whether the process runs at low priority, so that streaming jobs come first."""
    role: Role = Role.OPERATE
    """The least role that may start the operation."""
    dag: str = ""
    """Id of the DAG that starts it. Defaults to the operation's name."""
    tags: tuple[str, ...] = ()
    """Tags of the DAG. Defaults to the operation's name."""
    retries: int = 3
    """Retries of each task of the DAG, for errors that a retry may cure (millrace_airflow.defaults.FaultClassPolicy).
    """
    set_by_dag: tuple[str, ...] = ()
    """Parameters that the DAG passes to its runs and that its form therefore omits."""
    dag_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of parameters in the form of its DAG, where they differ from those of the class."""
    title: str = ""
    """Label of the button in the UI. Without one the UI does not offer the operation."""
    words: str = ""
    """Description in the UI, if it should say more than the summary."""
    changes_data: bool = True
    """Whether a run can change or remove stored data."""
    stands_behind: InitVar[bool | None] = None
    """Deprecated name of `low_priority`."""
    of_the_run: InitVar[tuple[str, ...] | None] = None
    """Deprecated name of `set_by_dag`."""

    def __post_init__(self, stands_behind: bool | None, of_the_run: tuple[str, ...] | None) -> None:
        for old, new, value in (
            ("stands_behind", "low_priority", stands_behind),
            ("of_the_run", "set_by_dag", of_the_run),
        ):
            if value is not None:
                warnings.warn(f"Operation({old}=...) is deprecated: use {new}", DeprecationWarning, stacklevel=3)
                object.__setattr__(self, new, value)
        unknown = set(self.set_by_dag) - self.params.model_fields.keys()
        if not self.name.isidentifier() or unknown:
            raise InvalidArgument(
                f"operation {self.name!r}: the name must be a Python identifier, and set_by_dag may only name "
                f"parameters; unknown: {sorted(unknown)}"
            )

    @property
    def dag_id(self) -> str:
        return self.dag or self.name

    def load(self) -> OperationFunction:
        """Return the function that runs the operation, importing it if needed."""
        if not isinstance(self.run, str):
            return self.run
        module, _, function = self.run.partition(":")
        found: OperationFunction = getattr(import_module(module), function)
        return found

    def trigger_problems(self, conf: Mapping[str, Any]) -> list[Problem]:
        """Return what is wrong with the parameters of a DAG trigger, by field.

        Parameters that the DAG passes to its runs may be missing. The others then have a problem of the kind
        "missing", although Airflow fills in the form's defaults.
        """
        if strange := [name for name in conf if name not in self.params.model_fields or name in self.set_by_dag]:
            known = ", ".join(name for name in self.params.model_fields if name not in self.set_by_dag)
            words = f"unknown parameter of {self.dag_id}; the parameters are {known or 'none'}"
            return [Problem(name, words, "extra_forbidden") for name in strange]
        try:
            self.params.model_validate(dict(conf))
        except ValidationError as error:
            passed = {(name, "missing") for name in self.set_by_dag}
            return [each for each in problems_of(error, conf) if (each.field, each.kind) not in passed]
        return []
