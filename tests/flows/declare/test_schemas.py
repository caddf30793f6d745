"""JSON Schemas that somebody declares.

What has no end is refused before a document meets it, since nobody can interrupt the validator.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from millrace.base.errors import PipelineInvalid
from millrace.flows.declare.expressions import MAX_UNFOLDED, unfolded
from millrace.flows.declare.flow import Flow
from millrace.pipelines.declaration import pipeline_of


def _declared(schema: dict[str, Any]) -> Flow:
    return pipeline_of(
        {
            "id": "p",
            "source": {"kind": "kafka", "bootstrap": ["b:1"], "topics": ["t"]},
            "steps": [{"kind": "json_schema", "schema": schema}],
            "sink": {"kind": "opensearch", "hosts": ["http://h:1"], "index_base": "i"},
        }
    )


def _doubling(levels: int, combine: str, name: str) -> dict[str, Any]:
    """Each definition refers to the next one twice."""
    refer = {"pointer": "#/$defs/a{}", "anchor": "#a{}"}[name]
    found: dict[str, Any] = {
        f"a{level}": {"$anchor": f"a{level}", combine: [{"$ref": refer.format(level + 1)}] * 2}
        for level in range(levels)
    }
    found[f"a{levels}"] = {"$anchor": f"a{levels}", "type": "string"}
    return {"$defs": found, "$ref": refer.format(0)}


@pytest.mark.parametrize("combine", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("name", ["pointer", "anchor"])
def test_references_that_multiply_without_end_are_refused(combine: str, name: str) -> None:
    begun = time.monotonic()
    with pytest.raises(PipelineInvalid, match="refer to each definition once"):
        _declared(_doubling(40, combine, name))
    assert time.monotonic() - begun < 5
    _declared(_doubling(5, combine, name))


def test_what_refers_to_itself_or_to_much_is_taken() -> None:
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "n": {"type": "integer"}}}
    _declared(tree)
    large = {
        "$defs": {"text": {"type": "string", "maxLength": 20}},
        "properties": {f"field{place}": {"$ref": "#/$defs/text"} for place in range(2000)},
    }
    assert 2000 < unfolded(large) < MAX_UNFOLDED
    _declared(large)
    assert unfolded({"$ref": "#/no/such", "items": [1, {"$ref": "elsewhere"}]}) < 10
