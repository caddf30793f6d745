"""Every call of pipelines and what it may answer to whom, made from the table of calls.

The same for the service alone and in Airflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from millrace.access.grants import ResourceKind, Role
from millrace.access.permissions import Requirement, Scope
from millrace.pipelines.api.routes import CALLS

PIPELINE = "flights"
Ask = Callable[[str, str, Any], tuple[int, Any]]
"""Method, path below /api/v1, body: status and answer."""


class Call(NamedTuple):
    name: str
    method: str
    path: str
    need: Requirement


def calls(app: Any) -> Iterator[Call]:
    """Each route of pipelines that `app` serves, over the pipeline `flights`."""
    for route in app.routes:
        if getattr(route, "name", "") in CALLS and route.path.startswith("/api/v1/"):
            (method,) = route.methods
            path = route.path.removeprefix("/api/v1/")
            names = {**dict.fromkeys(("to", "principal", "run", "account"), "other"), "pipeline": PIPELINE}
            yield Call(route.name, method, path.format(**names), CALLS[route.name])


def expected(call: Call, *, on_it: Role | None, on_all: Role | None, anywhere: bool) -> str:
    """What somebody gets who has the role `on_it` over the pipeline (None: none), `on_all` over the
    deployment, and `anywhere` any at all.
    """
    if call.need.scope is Scope.ANYTHING:
        return "let in" if anywhere else "refused"
    if call.need.scope is Scope.EVERYTHING:
        return "let in" if on_all is not None and not on_all.implied_roles.isdisjoint(call.need.roles) else "refused"
    assert call.need.scope is ResourceKind.PIPELINE
    if on_it is not None and not on_it.implied_roles.isdisjoint(call.need.roles):
        return "let in"
    return "refused" if on_it is not None and Role.READ in on_it.implied_roles else "hidden"


def got(ask: Ask, call: Call) -> str:
    """What somebody gets. Who is let in meets a body that no call takes, or has it done."""
    status, answer = ask(call.method, call.path, [] if call.method == "PUT" else None)
    if status == 401:
        return "logged out"
    if status == 403:
        return "refused"
    if status == 404 and answer["error"]["code"] == "PIPELINE_NOT_FOUND" and PIPELINE in answer["error"]["message"]:
        return "hidden"
    assert status < 500 or status == 503, (call, answer)  # 503: of the servers behind it none runs here
    return "let in"
