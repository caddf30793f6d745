"""Generate the tables of the pages that come from the code: settings, metrics, thresholds of the chain, permissions.

python -m tests.docs.reference    # rewrites them; a test fails if a page differs
"""

from __future__ import annotations

import re

from millrace.access.grants import ResourceKind
from millrace.access.permissions import MESSAGE_REQUIREMENTS, Requirement, Scope
from millrace.base.metrics import FAMILIES, NAMESPACE
from millrace.base.settings import LIVE, describe
from millrace.pipelines.api import routes as pipelines
from millrace.rpc.calls import SERVER_CALLS, Repeat, ServerCall
from millrace.service import cluster_routes, read_routes
from millrace.service.application import OPENAPI_CALLS
from millrace.wal.config import BOUNDS, ChainConfig
from tests.docs.code_facts import ROOT

OPERATING = "docs/operating.md"
ACCESS = "docs/access.md"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def settings_table() -> str:
    """Return one row for each setting."""
    text = _row("setting", "variable", "default", "meaning") + "|---|---|---|---|\n"
    for name, env, default, words in describe():
        words = f"{words} *Live.*" if name in LIVE else words
        text += _row(f"`{name}`", f"`{env}`", f"`{default or '(empty)'}`", words)
    return text


def metrics_table() -> str:
    """Return one row for each metric family."""
    text = _row("metric", "kind", "labels", "meaning") + "|---|---|---|---|\n"
    for name, family in FAMILIES.items():
        text += _row(f"`{NAMESPACE}_{name}`", family.kind, ", ".join(family.labels) or "-", family.description)
    return text


def thresholds_table() -> str:
    """Return one row for each key of the chain's configuration."""
    text = _row("key", "default", "least", "greatest") + "|---|---|---|---|\n"
    for key, value in ChainConfig().to_json().items():
        text += _row(f"`{key}`", str(value), *map(str, BOUNDS[key]))
    return text


def calls_table() -> str:
    """Return one row for each call of the log server."""
    text = _row("call", "role", "over", "request → answer", "what it does") + "|---|---|---|---|---|\n"
    for call in SERVER_CALLS.values():
        text += _row(f"`{call.name}`", _roles(call), _over(call), _keys(call), call.description)
    return text


def _keys(call: ServerCall) -> str:
    """Return the keys of a call's request and answer."""
    sides = [
        ", ".join(f"`{each}`" for each in keys) for keys in ((*filter(None, [call.ticket]), *call.request), call.answer)
    ]
    once = " (not repeated)" if call.repeat is Repeat.NEVER else ""
    return " → ".join(side or "-" for side in sides) + once


def service_table() -> str:
    """Return one row for each route of the service."""
    text = _row("route", "role", "over", "what it does") + "|---|---|---|---|\n"
    for name, need in {**OPENAPI_CALLS, **read_routes.CALLS, **cluster_routes.CALLS, **pipelines.CALLS}.items():
        text += _row(f"`{name}`", _roles(need), _over(need), need.description)
    return text


def messages_table() -> str:
    """Return one row for each message type."""
    text = _row("type", "role", "over") + "|---|---|---|\n"
    for kind, need in MESSAGE_REQUIREMENTS.items():
        text += _row(
            f"`{kind.name}`", _roles(need), "its VChannel" if need.scope is ResourceKind.VCHANNEL else _over(need)
        )
    return text


def _roles(need: Requirement) -> str:
    return " or ".join(f"`{role}`" for role in need.roles)


def _over(need: Requirement) -> str:
    if isinstance(need.scope, ResourceKind):
        return f"that {need.scope}"
    return "any" if need.scope is Scope.ANYTHING else "all"


TABLES = {
    (OPERATING, "All settings"): settings_table,
    (OPERATING, "Metrics"): metrics_table,
    (OPERATING, "Thresholds of the chain"): thresholds_table,
    (ACCESS, "Calls"): calls_table,
    (ACCESS, "The service's routes"): service_table,
    (ACCESS, "Messages in an append"): messages_table,
}
"""By page and heading: the function that generates the first table under it."""


def with_table(page: str, heading: str, table: str) -> str:
    """Return `page` with `table` as the first table under `heading`."""
    start = re.search(rf"^#+ {re.escape(heading)}$", page, re.MULTILINE)
    assert start is not None, f"no heading {heading!r}"
    old = re.compile(r"(?:^\|.*\n)+", re.MULTILINE).search(page, start.end())
    assert old is not None, f"no table under {heading!r}"
    return page[: old.start()] + table + page[old.end() :]


def main() -> None:
    """Rewrite the pages."""
    for (page, heading), make in TABLES.items():
        path = ROOT / page
        path.write_text(with_table(path.read_text(encoding="utf-8"), heading, make()), encoding="utf-8")


if __name__ == "__main__":
    main()
