"""The append host's name for whoever starts the log's server, without the import of what it is."""

from __future__ import annotations

from typing import Final

FACTORY: Final = "millrace.node.append_host_server:append_extension"
"""What a log server is given as --extension."""
