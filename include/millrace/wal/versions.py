"""Versions of the chain's behaviour: what new terms run, what this host can run, and where each begins to differ.

A term's opening says which one its log is judged by, and the state keeps it: whoever judges asks
``state.chain_version >= TABLES``. Of whole message types ``millrace.message.types.MIN_CHAIN_VERSION`` says it. docs/chain.md, "Versions".
"""

from __future__ import annotations

from typing import Final

VERSION_4: Final = 4
"""Tables of the real world: UPSERT, composite keys, more field types, changed schemas, checks, defaults, computed fields."""

CHAIN_VERSION: Final = VERSION_4
"""For new terms: it enters a log by the term's opening."""

CHAIN_VERSIONS: Final = (1, 2, 3, VERSION_4)
"""What this host can run; it refuses a log that asks for another."""
