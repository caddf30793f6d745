"""A process that changes one collection, beside others that do, and may be killed at a failpoint of the coordinator.

    python ddl_process.py <number> <turns>

The data folder comes from the environment (MILLRACE_DATA); the log's server is somebody else's to start.
"""

from __future__ import annotations

import contextlib
import sys

from millrace.client.client import Client
from millrace.errors import AppendRejected
from millrace.message.schema import FieldSpec


def main() -> None:
    """Add partitions and fields of its own, and partitions that all want."""
    number, turns = sys.argv[1], int(sys.argv[2])
    with Client.connect(start=False) as client:
        for turn in range(turns):
            client.coordinator.add_field("c", FieldSpec(f"f{number}_{turn}", "string", True))
            client.coordinator.create_partition("c", f"p{number}_{turn}")
            with contextlib.suppress(AppendRejected):  # one of them makes it
                client.coordinator.create_partition("c", f"shared{turn}")


if __name__ == "__main__":
    main()
