"""Which deployment a data folder is: an id of its own, so that what it keeps elsewhere (its backups) is known as its own.

Made once, when it is first asked for, and kept in the data folder. A restored deployment gets a new one: the one that it comes
from may go on beside it, and neither may take the other's backups for its own. A data folder that was copied by hand
has the id of its original: remove the file from the copy before both make backups into one folder.
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
    """The deployment's id; empty where none was made yet. Raises InvalidArgument where the file does not read."""
    path = settings.data_dir / DEPLOYMENT_FILE
    try:
        found = json.loads(path.read_bytes())["id"]
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str) or not found:
        raise InvalidArgument(
            f"{path} does not say which deployment this is: put it back, or remove it; the deployment then gets a new id, and the"
            " backups it made so far stay until you remove them"
        )
    return found


def ensure_deployment_id(settings: Settings) -> str:
    """The deployment's id, made where there is none yet: durable when this returns, the same to all who ask at once."""
    found = read_deployment_id(settings)
    if not found:
        make_folder(settings.data_dir)
        write_deployment_id(settings.data_dir)
        found = read_deployment_id(settings)
    return found


def write_deployment_id(data: Path, **origin: str) -> None:
    """Give the deployment in `data` an id, with what is known of where it comes from; one that it has stays."""
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
