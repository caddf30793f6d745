"""Check and prepare the data folder: permissions, known entries, and file names for names from the data.

This module needs no third-party library: `make clean-data` runs it with any Python, without an environment.
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
        "capture-spools",
        "captures",
        "checkpoints",
        "collections",
        "coord",
        "deletes",
        "demo-capture",
        "demo-streams",
        "deployment.json",
        "derived",
        "inbox",
        "log",
        "parked",
        "pins",
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
        "tables",
        "wal",
        "wal_trims",
    }
)


_LONGEST: Final = 200
"""Maximum bytes of a file name that come from the data; file systems allow 255."""


def encode_file_name(name: str) -> str:
    """Return a name from the data, such as a collection's, as one safe path component.

    Plain names are unchanged. A long name is cut and gets a digest as its suffix.
    """
    plain = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    data = plain.encode("utf-8", "backslashreplace")
    if len(data) <= _LONGEST:
        return data.decode()
    return data[:_LONGEST].decode("utf-8", "ignore") + hashlib.sha256(data).hexdigest()[:16]


def check_data_folder(folder: Path, where: str) -> None:
    """Check that `folder` can be a data folder; `where` names the setting that it came from.

    Creates nothing. A folder that does not exist yet is valid.
    Raises InvalidSettings if the name is not UTF-8 (table names are URIs, records are JSON), if it is too long for the
    file system, or if the path is not a folder.
    """
    from millrace.base.errors import InvalidSettings  # `make clean-data` runs without this module

    shown = repr(os.fspath(folder))
    try:
        os.fspath(folder).encode()
        found = folder.stat()
    except FileNotFoundError:
        return
    except UnicodeEncodeError:
        raise InvalidSettings(
            f"{where} = {shown}: the name of a data folder must be UTF-8; choose another folder"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidSettings(f"{where} = {shown} cannot be a data folder: {reason}; choose another folder") from None
    if not stat.S_ISDIR(found.st_mode):
        raise InvalidSettings(f"{where} = {shown} is not a folder; give the deployment's data folder")


def require_deployment(folder: Path) -> None:
    """Check that `folder` holds a deployment or is empty.

    A new deployment at a mistyped path would hide the one that was meant.
    Raises InvalidArgument otherwise, and whatever :func:`check_data_folder` raises.
    """
    from millrace.base.errors import InvalidArgument  # `make clean-data` runs without this module

    check_data_folder(folder, "the data folder")
    advice = "correct the path, or create a deployment there with millrace.connect(path, create=True)"
    if not folder.exists():
        raise InvalidArgument(f"there is no deployment at {folder}: {advice}")
    held = {path.name for path in folder.iterdir()}
    if held and not held & KNOWN_ENTRIES:
        raise InvalidArgument(f"{folder} is not a deployment, it holds {', '.join(sorted(held)[:3])}: {advice}")


def restrict_umask() -> None:
    """Make files of this process and of its children accessible to their owner only; for entry points."""
    os.umask(0o077)


def prepare_data_folder(folder: Path) -> None:
    """Create the data folder with mode 700; close an existing one that others can read, and log a warning.

    Raises InvalidSettings if the folder cannot be created.
    Raises UnsafeDataFolder if others can write to it: its content may not be ours.
    """
    from millrace.base.errors import InvalidSettings, UnsafeDataFolder  # `make clean-data` runs without this module
    from millrace.base.files import make_folder

    check_data_folder(folder, "the data folder")
    try:
        make_folder(folder, 0o700)
    except OSError as error:
        raise InvalidSettings(
            f"the data folder {folder} cannot be created: {error.strerror}; choose another folder"
        ) from error
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeDataFolder(
            f"users other than its owner can write to {folder} (mode {mode:o}), and so change rows or code: check its"
            f" content, then run: chmod 700 {folder}"
        )
    if mode & 0o077 and found.st_uid == os.geteuid():
        folder.chmod(0o700)
        logging.getLogger(__name__).warning("%s was readable by others (mode %o); its mode is now 700", folder, mode)


def unknown_entries(folder: Path) -> list[str]:
    """Return the names in `folder` that are not Millrace's, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.name not in KNOWN_ENTRIES)


def main() -> int:
    """Print the unknown entries of the folder on the command line; return 1 if there are any, or if it is not a
    folder.
    """
    folder = Path(sys.argv[1])
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is not a folder.\n")
        return 1
    found = unknown_entries(folder)
    if found:
        sys.stderr.write(
            f"{folder} holds {', '.join(found[:5])}, which is not Millrace's: remove it yourself, or choose another"
            " folder with MILLRACE_DATA.\n"
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
