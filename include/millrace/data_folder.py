"""What a data folder holds, by name: nobody removes one that holds something else, too.

Light, and for any Python: `make clean-data` asks it where there is no environment any more.
"""

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
