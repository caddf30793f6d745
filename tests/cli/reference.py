"""The part of docs/cli.md that is made from the program: every command, its options and examples.

``python -m tests.cli.reference`` writes it anew; a test holds the page against it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from millrace.commands.main import app
from millrace.commands.parts.command_line import SHARED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
MARK = "<!-- From here on the page is made by `python -m tests.cli.reference`. -->\n"

_EXAMPLE = re.compile(r"Example: `(.+?)`(?=\n|$)")


@dataclass(frozen=True)
class Command:
    """One command as the program defines it."""

    path: tuple[str, ...]
    definition: Any

    @property
    def words(self) -> str:
        """Its help without the examples."""
        help_text = _EXAMPLE.sub("", self.definition.help or "")
        return re.sub(r"\n{3,}", "\n\n", help_text).strip()

    @property
    def examples(self) -> list[str]:
        return _EXAMPLE.findall(self.definition.help or "")

    def markdown(self) -> str:
        arguments = [each for each in self.definition.params if each.param_type_name == "argument"]
        options = [each for each in self.definition.params if each.param_type_name == "option" and each.name != "help"]
        usage = " ".join(
            ["millrace", *self.path, "[OPTIONS]", *(each.metavar or each.name.upper() for each in arguments)]
        )
        lines = [f"### millrace {' '.join(self.path)}", "", f"`{usage}`", "", self.words, ""]
        lines += [f"    {example}" for example in self.examples]
        lines += ["", *_table([*arguments, *options])] if arguments or options else []
        shared = [f"`{each.opts[0]}`" for each in shared_options() if each.name in self.takes]
        lines += ["", f"Shared options: {', '.join(shared)}."] if shared else []
        return "\n".join(lines) + "\n"

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the shared options that it takes."""
        takes: tuple[str, ...] = getattr(self.definition.context_class, "takes", ())
        return takes


def _table(parameters: list[Any]) -> list[str]:
    lines = ["| | |", "|---|---|"]
    for each in parameters:
        argument = each.param_type_name == "argument"
        names = each.metavar or each.name.upper() if argument else ", ".join(each.opts)
        value = "" if argument or each.is_flag else f" {_value(each)}"
        default = "" if each.default in (None, False, "") or argument else f" Default: {_plain(each.default)}."
        lines.append(f"| `{names}{value}` | {each.help}{default} |")
    return lines


def _value(option: Any) -> str:
    kind = option.bare_type
    choices = [str(each.value) for each in kind] if isinstance(kind, type) and issubclass(kind, Enum) else []
    return "\\|".join(choices) or str(option.metavar or option.name.upper()).replace("|", "\\|")


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _walk(group: Any, path: tuple[str, ...]) -> Iterator[Command]:
    for name, each in group.commands.items():
        if each.hidden:
            continue  # an old name
        if hasattr(each, "commands"):
            yield from _walk(each, (*path, name))
        else:
            yield Command((*path, name), each)


@cache
def _program() -> Any:
    return get_command(app)


def shared_options() -> list[Any]:
    """The options of the program that commands take too."""
    return [each for each in _program().params if each.name in SHARED]


def commands() -> list[Command]:
    """All commands, groups gone through."""
    return list(_walk(_program(), ()))


def groups() -> list[tuple[str, ...]]:
    """The groups of commands."""
    return sorted({each.path[:-1] for each in commands()} - {()})


def command(path: tuple[str, ...]) -> Command:
    return next(each for each in commands() if each.path == path)


def parse(example: str) -> None:
    """Have the program parse `example` without running it; raises what is wrong with it."""
    words = shlex.split(example)
    words = words[words.index("millrace") + 1 :]
    current = _program()
    context = None
    while hasattr(current, "commands"):
        name, words = words[0], words[1:]
        context = current.make_context("millrace", [name], parent=context, resilient_parsing=True)
        current = current.commands[name]
    current.make_context(current.name, words, parent=context)


def written(page: str) -> str:
    """The page with its second part made anew."""
    prose, mark, _ = page.partition(MARK)
    assert mark, f"{PAGE.name} has no line {MARK!r}"
    parts = [
        prose + mark,
        "## Shared options\n",
        "Options of the program that many commands take. They stand before or after the command's name; each command\n"
        "below says which it takes.\n",
        *_table(shared_options()),
        "",
        "## Every command\n",
        *(each.markdown() for each in commands()),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
