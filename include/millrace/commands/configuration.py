"""``millrace config show`` and ``millrace version``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.base.package import VERSION
from millrace.base.settings import PREFIX, Settings, describe
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    JsonContext,
    command_group,
    print_facts,
    print_rows,
    root,
)

app = command_group("config", OPERATE_PANEL, "Show the settings.")

LIBRARIES = ("pyspark", "delta-spark", "deltalake", "pyarrow", "duckdb")


@app.command()
def show(
    context: JsonContext,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from their default.")] = False,
) -> None:
    """Show every setting with its value, source, environment variable and meaning. Credentials are never shown.

    Example: `millrace config show --changed`
    """
    rows = setting_rows(context.settings, by_option=context.data is not None)
    print_rows(
        [row for row in rows if not changed or row["source"] != "default"],
        columns=("setting", "value", "source", "variable", "meaning"),
        as_json=context.as_json,
        empty="All settings have their defaults.",
    )


def setting_rows(settings: Settings, *, by_option: bool) -> list[dict[str, Any]]:
    """Return each setting with its source: --data, environment, file (if it differs from the default) or default."""
    user = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    defaults = Settings.load(env=user)
    file = os.environ.get("MILLRACE_CONFIG")
    filed = Settings.load(env=user, file=file) if file else defaults
    rows = []
    for name, variable, default, words in describe():
        if name == "data_dir" and by_option:
            source = "--data"
        elif variable in os.environ:
            source = "environment"
        elif getattr(filed, name) != getattr(defaults, name):
            source = f"file {Path(file or '').name}"
        else:
            source = "default"
        value = getattr(settings, name)
        rows.append(
            {
                "setting": name,
                "value": str(value) if isinstance(value, Path) else value,
                "source": source,
                "variable": variable,
                "default": default,
                "meaning": words,
            }
        )
    return rows


@root.command(rich_help_panel=OPERATE_PANEL)
def version(context: JsonContext) -> None:
    """Show the versions of Millrace, its chain, Python and the main libraries.

    Example: `millrace version`
    """
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from millrace.wal.chain import CHAIN_VERSION

    facts: dict[str, Any] = {
        "millrace": VERSION,
        "chain_version": CHAIN_VERSION,
        "python": platform.python_version(),
    }
    for library in LIBRARIES:
        try:
            facts[library] = installed(library)
        except PackageNotFoundError:
            facts[library] = None
    print_facts(facts, as_json=context.as_json)
