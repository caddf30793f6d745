"""Requests that the description allows, drawn by schemathesis: none is answered with 500."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given

from tests.pipelines.api.test_routes import DECLARED, OWN, Service, service

SOAK = os.environ.get("TEST_PROFILE") == "soak"
CASES = 400 if SOAK else 4
"""Of each call; there are 31, of which those that take nothing have fewer: more than 10,000 in a soak."""

__all__ = ["service"]


@pytest.mark.slow
def test_no_request_is_answered_with_500(service: Service) -> None:
    schema = schemathesis.openapi.from_dict(dict(service.app.openapi()))
    tried: list[int] = []

    def send(case: Any, *, known: bool) -> None:
        if known:
            service.ask("PUT", "pipelines/flights", DECLARED)
            if "pipeline" in (case.path_parameters or {}):
                case.path_parameters["pipeline"] = "flights"
        asked = case.as_transport_kwargs(base_url="http://testserver")
        sent = {
            name: asked[name] for name in ("method", "url", "params", "json", "data") if asked.get(name) is not None
        }
        answer = service.client.request(**sent, headers={"Authorization": f"Bearer {OWN}"})
        tried.append(answer.status_code)
        assert answer.status_code != 500, (sent, answer.text)

    for operation in schema.get_all_operations():
        found = operation.ok()

        @given(case=found.as_strategy(), known=hypothesis.strategies.booleans())
        @hypothesis.settings(
            max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
        )
        def each(case: Any, known: bool) -> None:
            send(case, known=known)

        each()
    assert len(tried) >= (10_000 if SOAK else 31 * CASES // 2)
    print(f"{len(tried)} requests: {dict(sorted(Counter(tried).items()))}")
    assert {200, 404, 422} <= set(tried)
