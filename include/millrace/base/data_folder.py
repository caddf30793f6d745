"""The data folder: who may enter it, and what it holds, by name: nobody removes one that holds something else, too; how names of data become names of files.

Light, and for any Python: `make clean-data` asks it where there is no environment any more.
"""

import hashlib
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Final

KNOWN_ENTRIES: Final = frozenset(
    {
        "access",
        "airflow",
        "bases",
        "brokers",
        "checkpoints",
        "collections",
        "coord",
        "deletes",
        "demo-streams",
        "deployment.json",
        "derived",
        "inbox",
        "log",
        "parked",
        "pipeline",
        "pipelines",
        "quality",
        "recovery_checkpoints",
        "restores",
        "run",
        "segments",
        "spark",
        "staged",
        "streams",
        "wal",
        "wal_trims",
    }
)


_LONGEST: Final = 200
"""Bytes of a file's name that come from a name in the data; the file system takes 255."""


def encode_file_name(name: str) -> str:
    """The name of a collection, say, as one part of a path: it leads nowhere, and plain names stay as they are."""
    plain = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    data = plain.encode("utf-8", "backslashreplace")
    if len(data) <= _LONGEST:
        return data.decode()
    return data[:_LONGEST].decode("utf-8", "ignore") + hashlib.sha256(data).hexdigest()[:16]


def check_data_folder(folder: Path, where: str) -> None:
    """Raise InvalidSettings if `folder`, which `where` named, cannot be a data folder.

    Its name is not UTF-8 (the tables' names are URIs, the records JSON) or is longer than the file system takes, or something
    else than a folder has that name. A folder that does not exist yet is fine. Makes nothing.
    """
    from millrace.base.errors import InvalidSettings  # not where `make clean-data` runs this

    shown = repr(os.fspath(folder))
    try:
        os.fspath(folder).encode()
        found = folder.stat()
    except FileNotFoundError:
        return
    except UnicodeEncodeError:
        raise InvalidSettings(
            f"{where} = {shown}: the name of a data folder has to be UTF-8; name another folder"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidSettings(f"{where} = {shown} cannot be a data folder: {reason}; name another folder") from None
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidSettings(f"{where} = {shown} is not a folder; name the deployment's data folder")


def require_deployment(folder: Path) -> None:
    """Refuse a folder that a typing error may have named: a new deployment there would hide the one that was meant.

    An empty folder is fine: somebody made it. Raises InvalidArgument, and what :func:`check_data_folder` raises.
    """
    from millrace.base.errors import InvalidArgument  # not where `make clean-data` runs this

    check_data_folder(folder, "the data folder")
    advice = "correct the path, or make a deployment there with millrace.connect(path, create=True)"
    if not folder.exists():
        raise InvalidArgument(f"there is no deployment at {folder}: {advice}")
    held = {path.name for path in folder.iterdir()}
    if held and not held & KNOWN_ENTRIES:
        raise InvalidArgument(f"{folder} is no deployment, it holds {', '.join(sorted(held)[:3])}: {advice}")


def restrict_umask() -> None:
    """For entry points: what this process makes, and what the processes make that it starts, is its user's alone."""
    os.umask(0o077)


def prepare_data_folder(folder: Path) -> None:
    """Make the data folder, for its user alone; one that others can read is closed to them, and a line says so.

    Raises InvalidSettings if the folder cannot be made, UnsafeDataFolder where others can write to it: what is in there may not be
    what we wrote.
    """
    from millrace.base.errors import InvalidSettings, UnsafeDataFolder  # not where `make clean-data` runs this
    from millrace.base.files import make_folder

    check_data_folder(folder, "the data folder")
    try:
        make_folder(folder, 0o700)
    except OSError as error:
        raise InvalidSettings(
            f"the data folder {folder} cannot be made: {error.strerror}; name another folder"
        ) from error
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeDataFolder(
            f"others than its owner can write to {folder} (mode {mode:o}), and so change rows, or what runs: look at what is in"
            f" it, then close it with: chmod 700 {folder}"
        )
    if mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)
        logging.getLogger(__name__).warning("%s could be read by others (mode %o): closed to them (700)", folder, mode)


def unknown_entries(folder: Path) -> list[str]:
    """What lies in `folder` and is not Millrace's, by name."""
    return sorted(path.name for path in folder.iterdir() if path.name not in KNOWN_ENTRIES)


def main() -> int:
    """Say what is strange in the folder that the command line names; 1 where something is, or where there is no folder."""
    folder = Path(sys.argv[1])
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is no folder.\n")
        return 1
    found = unknown_entries(folder)
    if found:
        sys.stderr.write(
            f"{folder} holds {', '.join(found[:5])}, which is not Millrace's: remove it yourself, or name another folder"
            " with MILLRACE_DATA.\n"
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
