"""The ``[millrace]`` table of a settings file."""

from __future__ import annotations

import configparser
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from millrace.base.errors import InvalidSettings


def read_settings_file(path: Path) -> Mapping[str, Any]:
    """Return the ``[millrace]`` table of a TOML or INI file, by its suffix.

    Raises InvalidSettings if the file cannot be read, is malformed, or holds something but no ``[millrace]``: its lines would be
    ignored silently.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSettings(f"the settings file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidSettings(
            f"the settings file {path} is not UTF-8 at byte {error.start}: save it as UTF-8"
        ) from error
    except ValueError as error:
        raise InvalidSettings(f"the settings file {str(path)!r} cannot be read: {error}") from error
    try:
        if path.suffix == ".toml":
            document = tomllib.loads(text)
            table = document.get("millrace", {})
            if not isinstance(table, dict):
                raise InvalidSettings(f"{path.name}: millrace must be a table, [millrace]")
            _require_table("millrace" in document, path, document)
            return table
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        _require_table(parser.has_section("millrace"), path, parser.sections())
        return dict(parser["millrace"]) if parser.has_section("millrace") else {}
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise InvalidSettings(f"the settings file {path.name} is malformed: {error}") from error


def _require_table(found: bool, path: Path, others: Iterable[str]) -> None:
    """Refuse a file that holds `others` and no table of ours."""
    if not found and (named := list(others)):
        shown = ", ".join(named[:5])
        raise InvalidSettings(
            f"{path.name} has no table [millrace], only {shown}: put the settings under a line [millrace], such as"
            " [millrace] and then pchannels = 4"
        )
