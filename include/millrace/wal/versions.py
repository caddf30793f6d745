"""Versions of the chain's behaviour.

The version for new terms, the versions that this host runs, and their differences.

The opening of a term says by which version its log is judged, and the state keeps it: rules check
``state.chain_version >= VERSION_4``. ``millrace.message.types.MIN_CHAIN_VERSION`` has the versions of message
types. docs/chain.md, "Versions".
"""

from __future__ import annotations

from typing import Final

VERSION_4: Final = 4
"""UPSERT, composite keys, more field types, schema changes, checks, defaults, computed fields."""

VERSION_5: Final = 5
"""Entries that name their principal: a host appends them only in a term of this version, which older builds refuse."""

CHAIN_VERSION: Final = VERSION_5
"""Version of new terms. It enters a log by the opening of a term."""

CHAIN_VERSIONS: Final = (1, 2, 3, VERSION_4, VERSION_5)
"""Versions that this host runs. It refuses a log that needs another."""
