"""What a data folder holds, by name: nobody removes one that holds something else, too; how names of data become names of files.

Light, and for any Python: `make clean-data` asks it where there is no environment any more.
"""

import hashlib
import sys
from pathlib import Path
from typing import Final

NAMES: Final = frozenset(
    {
        "airflow",
        "bases",
        "brokers",
        "checkpoints",
        "collections",
        "coord",
        "deletes",
        "deployment.json",
        "derived",
        "log",
        "parked",
        "quality",
        "recovery_checkpoints",
        "restores",
        "run",
        "segments",
        "spark",
        "staged",
        "wal",
        "wal_trims",
    }
)


_LONGEST: Final = 200
"""Bytes of a file's name that come from a name in the data; the file system takes 255."""


def as_file_name(name: str) -> str:
    """The name of a collection, say, as one part of a path: it leads nowhere, and plain names stay as they are."""
    plain = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    data = plain.encode("utf-8", "backslashreplace")
    if len(data) <= _LONGEST:
        return data.decode()
    return data[:_LONGEST].decode("utf-8", "ignore") + hashlib.sha256(data).hexdigest()[:16]


def strange(folder: Path) -> list[str]:
    """What lies in `folder` and is not Millrace's, by name."""
    return sorted(path.name for path in folder.iterdir() if path.name not in NAMES)


def main() -> int:
    """Say what is strange in the folder that the command line names; 1 where something is, or where there is no folder."""
    folder = Path(sys.argv[1])
    if not folder.is_dir():
        sys.stderr.write(f"{folder} is no folder.\n")
        return 1
    found = strange(folder)
    if found:
        sys.stderr.write(
            f"{folder} holds {', '.join(found[:5])}, which is not Millrace's: remove it yourself, or name another folder"
            " with MILLRACE_DATA.\n"
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
