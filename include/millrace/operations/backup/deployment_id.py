"""The id of a deployment. It marks what belongs to the deployment outside its data folder, such as its backups.

Created on first use and kept in the data folder. A restored deployment gets a new id: the original may keep running,
and neither may treat the other's backups as its own. A data folder that was copied by hand has the id of its original.
Remove the file from the copy before both make backups into one folder.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Final

from millrace.base.errors import InvalidArgument
from millrace.base.files import make_folder, sync
from millrace.base.settings import Settings

DEPLOYMENT_FILE: Final = "deployment.json"


def read_deployment_id(settings: Settings) -> str:
    """Return the deployment's id, or "" if it has none yet. Raises InvalidArgument if the file is invalid."""
    path = settings.data_dir / DEPLOYMENT_FILE
    try:
        found = json.loads(path.read_bytes())["id"]
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str) or not found:
        raise InvalidArgument(
            f"{path} does not contain a deployment id: put it back, or remove it. Without it the deployment gets a new "
            "id, and its earlier backups stay until you remove them"
        )
    return found


def ensure_deployment_id(settings: Settings) -> str:
    """Return the deployment's id, creating it if needed. It is durable, and the same for concurrent callers."""
    found = read_deployment_id(settings)
    if not found:
        make_folder(settings.data_dir)
        write_deployment_id(settings.data_dir)
        found = read_deployment_id(settings)
    return found


def write_deployment_id(data: Path, **origin: str) -> None:
    """Give the deployment in `data` an id, together with its `origin` if known. An existing id stays."""
    draft = data / f".{DEPLOYMENT_FILE}.{secrets.token_hex(4)}"
    with draft.open("x") as file:
        json.dump({"id": secrets.token_hex(16), **origin}, file)
        file.flush()
        sync(file.fileno())
    try:
        os.link(draft, data / DEPLOYMENT_FILE)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    sync(data)
