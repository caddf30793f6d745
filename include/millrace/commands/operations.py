"""``millrace operations``: each operation as a command, made from its declaration: its parameters are the options."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millrace.commands.parts.command_line import (
    EXIT_VERIFICATION_FAILED,
    OPERATE_PANEL,
    CommandGroup,
    JsonContext,
    ReportingGroup,
    command_group,
    parse_json_object,
    print_facts,
)

if TYPE_CHECKING:
    from millrace.operations.operation import Operation


class OperationsGroup(ReportingGroup):
    """The commands of all operations. They are made on first use, because declarations import pydantic."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": {}})
        del self.commands

    @cached_property
    def commands(self) -> dict[str, Any]:  # type: ignore[override] # an attribute there
        from millrace.operations.registry import operations

        made = CommandGroup(cls=ReportingGroup)
        for each in operations().values():
            made.command(each.name.replace("_", "-"))(_command(each))
        group: Any = typer.main.get_group(made)
        return dict(group.commands)


app = command_group(
    "operations",
    OPERATE_PANEL,
    "Run an operation here, to its end; `millrace jobs start` runs it detached.",
    cls=OperationsGroup,
)


def _command(operation: Operation) -> Callable[..., None]:
    """Return the command of an operation: a function whose signature has an option for each parameter."""

    def run(*, context: JsonContext, params: str | None, **given: Any) -> None:
        from millrace.client.progress import operation_words, progress_line
        from millrace.operations.entry import run_in_process
        from millrace.runtime.progress import Progress

        chosen = operation.params.parse(
            parse_json_object(params) | {name: value for name, value in given.items() if value not in (None, [])}
        )
        with progress_line("starting …") as line:
            progress = Progress(show=lambda found: line(operation_words(found)))
            report = run_in_process(operation, context.settings, chosen, progress)
        print_facts(report.to_json(), as_json=context.as_json)
        if not report.succeeded:
            raise typer.Exit(EXIT_VERIFICATION_FAILED)

    schema = operation.params.model_json_schema()
    whole = typer.Option("--params", metavar="JSON", help="Parameters as a JSON object; the options override it.")
    options: dict[str, Any] = {
        "context": JsonContext,
        **{name: _option(name, field) for name, field in schema["properties"].items()},
        "params": Annotated[str | None, whole],
    }
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in options.items()
        ]
    )
    run.__annotations__ = options
    run.__doc__ = (
        f"{operation.summary}\n\nExample:"
        f" `millrace operations {operation.name.replace('_', '-')} {operation.example}".rstrip()
        + "`"
    )
    return run


def _option(name: str, field: Mapping[str, Any]) -> Any:
    """Return the option of a parameter, from its JSON schema.

    Values pass as text: the parameters' class checks them, and says what they take.
    """
    parts = [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]
    kind = parts[0]["items"] if parts[0].get("type") == "array" else parts[0]
    flag = f"--{name.replace('_', '-')}"
    default = field.get("default")
    words = field["description"]
    if default not in (None, "", [], False):
        words += f" Default: {default if isinstance(default, str) else json.dumps(default)}."
    if kind.get("type") == "boolean":
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=words, show_default=False)]
    values = (
        "|".join(kind["enum"]) if "enum" in kind else {"integer": "N", "number": "N"}.get(kind.get("type", ""), "TEXT")
    )
    option = typer.Option(flag, metavar=values, help=words, show_default=False)
    return Annotated[list[str] | None if kind is not parts[0] else str | None, option]
