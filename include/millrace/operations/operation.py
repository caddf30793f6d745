"""What every operation is made of: its declaration, checked parameters, a report.

    BACKUP = Operation(name="backup", summary="Copies the whole deployment …", params=BackupParams, run="millrace.operations.backup.run:run")

All that is told of an operation is told there: its job, its command, the form, role, tags and retries of its DAG, its button in the
UI. This module imports neither Spark nor Delta nor Airflow, and no declaration may (tests/operations/test_declarations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Final, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from millrace.access.grants import Role
from millrace.base.errors import InvalidArgument
from millrace.message.ids import resolve_tick
from millrace.pipelines.model.part import problems_of

TIME_PATTERN: Final = (
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


TimeParam: TypeAlias = Annotated[str, AfterValidator(_moment), Field(json_schema_extra={"pattern": TIME_PATTERN})]
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
            raise InvalidArgument(cls.describe_errors(error, value)) from None

    @classmethod
    def describe_errors(cls, error: ValidationError, value: Mapping[str, Any], *, ignore: Collection[str] = ()) -> str:
        """What is wrong with `value`, field by field, without faults of the kinds `but`; empty: nothing else."""
        known = f"is no parameter; there are {', '.join(cls.model_fields)}"
        return "; ".join(
            f"{each.field or 'parameters'}: {known if each.kind == 'extra_forbidden' else each.message}"
            for each in problems_of(error, value)
            if each.kind not in ignore
        )


class OperationReport(BaseModel):
    """What an operation did, as plain data: it goes into the task's result and is shown in the UI."""

    model_config = ConfigDict(frozen=True)

    @property
    def succeeded(self) -> bool:
        """Whether all is well; where it is not, the command ends with exit code 3."""
        return True

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


OperationFunction: TypeAlias = Callable[..., OperationReport]
"""``run(settings, params, progress)``, or ``run(spark, settings, params, progress)`` of an operation that needs Spark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The declaration of an operation: everything else about it is made from this."""

    name: str
    """Of its job and its command, as a Python name."""
    summary: str
    """What it does, in a line."""
    params: type[OperationParams]
    run: str | OperationFunction
    """``module:function``, imported when it runs; or the function where its module is light."""
    example: str = ""
    """Options of a call of its command, as the command's help shows it."""
    needs_spark: bool = False
    low_priority: bool = False
    """It may wait, what streams may not: its process has a lower priority."""
    role: Role = Role.OPERATE
    """The least role that may start it."""
    dag: str = ""
    """The DAG that people start it by; without one it has the operation's name."""
    tags: tuple[str, ...] = ()
    """Of the DAG; without any it is the operation's name."""
    retries: int = 3
    """Of each task of its DAG, where the error's class lets it (millrace_airflow.defaults.FaultClassPolicy)."""
    set_by_dag: tuple[str, ...] = ()
    """Parameters that the DAG gives to its runs, which its form therefore does not ask for."""
    title: str = ""
    """What its button in the UI says; without one the UI does not start it."""
    words: str = ""
    """What the UI says of the DAG, where that is more than the summary."""
    changes_data: bool = True
    """Whether a run can change or remove what is stored."""

    def __post_init__(self) -> None:
        unknown = set(self.set_by_dag) - self.params.model_fields.keys()
        if not self.name.isidentifier() or unknown:
            raise InvalidArgument(
                f"operation {self.name!r}: a Python name, and no parameters but its own: {sorted(unknown)}"
            )

    @property
    def dag_id(self) -> str:
        return self.dag or self.name

    def load(self) -> OperationFunction:
        """The function that does it."""
        if not isinstance(self.run, str):
            return self.run
        module, _, function = self.run.partition(":")
        found: OperationFunction = getattr(import_module(module), function)
        return found

    def trigger_errors(self, conf: Mapping[str, Any]) -> str:
        """What is wrong with the parameters that somebody triggers its DAG with; empty: nothing that can be told before it runs.

        Parameters that the DAG gives to its runs may be missing, and others have defaults in the form: Airflow asks for them.
        """
        if strange := [name for name in conf if name not in self.params.model_fields or name in self.set_by_dag]:
            known = ", ".join(name for name in self.params.model_fields if name not in self.set_by_dag)
            return "; ".join(
                f"{name}: is no parameter of {self.dag_id}; there are {known or 'none'}" for name in strange
            )
        try:
            self.params.model_validate(dict(conf))
        except ValidationError as error:
            return self.params.describe_errors(error, conf, ignore=("missing",))
        return ""
