"""The ``[millrace]`` table of a settings file."""

from __future__ import annotations

import configparser
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.base.errors import InvalidSettings


def read_table(path: Path) -> Mapping[str, Any]:
    """The ``[millrace]`` table of a TOML or INI file, by its suffix."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidSettings(f"the settings file {path} cannot be read: {error.strerror}") from error
    try:
        if path.suffix == ".toml":
            table = tomllib.loads(text).get("millrace", {})
            if not isinstance(table, dict):
                raise InvalidSettings(f"{path.name}: millrace must be a table, [millrace]")
            return table
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        return dict(parser["millrace"]) if parser.has_section("millrace") else {}
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise InvalidSettings(f"the settings file {path.name} is malformed: {error}") from error
