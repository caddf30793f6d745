"""``millrace config``, which shows settings and changes those that may change while Millrace runs, and ``version``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from millrace.base.errors import InvalidSettings
from millrace.base.package import VERSION
from millrace.base.settings import LIVE, PREFIX, Settings, describe
from millrace.base.settings.live import read_changed
from millrace.commands.parts.command_line import (
    OPERATE_PANEL,
    CommandContext,
    JsonContext,
    command_group,
    print_facts,
    print_rows,
    root,
)

app = command_group("config", OPERATE_PANEL, "Show the settings, and change some while Millrace runs.")

LIBRARIES = ("pyspark", "delta-spark", "deltalake", "pyarrow", "duckdb")


def _complete_live(incomplete: str) -> list[str]:
    return sorted(name for name in LIVE if name.startswith(incomplete))


@app.command()
def show(
    context: JsonContext,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from their default.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Only settings that may change while Millrace runs.")] = False,
) -> None:
    """Show every setting with its value, source, environment variable and meaning. Credentials are never shown.

    Example: `millrace config show --changed`
    """
    rows = setting_rows(context.settings, by_option=context.data is not None)
    print_rows(
        [row for row in rows if (not changed or row["source"] != "default") and (not live or row["setting"] in LIVE)],
        columns=("setting", "value", "source", "variable", "meaning"),
        as_json=context.as_json,
        empty="All settings have their defaults.",
    )


@app.command("set")
def set_setting(
    context: CommandContext,
    name: Annotated[str, typer.Argument(metavar="SETTING", help="The setting's name.", autocompletion=_complete_live)],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="Its value, as in the environment.")],
) -> None:
    """Change a setting while Millrace runs, on every host. It counts within seconds, and over environment and file.

    `millrace config show --live` lists the settings that may change. Nothing is stored if the value is not allowed.

    Example: `millrace config set flush_interval 5`
    """
    found = _change(context.settings, put={name: value})
    typer.echo(f"{name} is {getattr(found, name)}, here and on every host within seconds.")


@app.command("unset")
def unset_setting(
    context: CommandContext,
    name: Annotated[str, typer.Argument(metavar="SETTING", help="The setting's name.", autocompletion=_complete_live)],
) -> None:
    """Give a setting back the value of the environment and the settings file.

    Example: `millrace config unset flush_interval`
    """
    parse_name(name)
    found = _change(context.settings, remove=[name])
    typer.echo(f"{name} is as in the environment and the settings file of each host: {getattr(found, name)} here.")


def parse_name(name: str) -> None:
    """Raise InvalidSettings unless `name` is a setting that may change while Millrace runs."""
    if name not in LIVE:
        raise InvalidSettings(
            f"{name} is not a setting that can change while Millrace runs; these can: {', '.join(sorted(LIVE))}"
        )


def _change(settings: Settings, *, put: Mapping[str, str] | None = None, remove: Sequence[str] = ()) -> Settings:
    from millrace.coord.balancer.policies import policy_of
    from millrace.coord.machine.settings import change_settings
    from millrace.node.append.flow_monitor import limits_of

    def check(found: Settings) -> None:
        limits_of(found)
        policy_of(found)

    return change_settings(settings, put=put, remove=remove, check=check)


def setting_rows(settings: Settings, *, by_option: bool) -> list[dict[str, Any]]:
    """Return each setting with its source: `millrace config set`, --data, environment, file or default."""
    changed = read_changed(settings)
    settings = changed.applied_to(settings)
    user = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    defaults = Settings.load(env=user)
    file = os.environ.get("MILLRACE_CONFIG")
    filed = Settings.load(env=user, file=file) if file else defaults
    rows = []
    for name, variable, default, words in describe():
        if name in changed.values:
            source = "config set"
        elif name == "data_dir" and by_option:
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
