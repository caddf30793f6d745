"""Lines of the spool that a polling source makes."""

from __future__ import annotations

import msgspec
import pytest

from millrace.flows.sources.capture.polling import line_of


@pytest.mark.parametrize("text", ['{"a":\n [1,\n  2]}', '{"a": "x\\ny"}', "[\n]"])
def test_a_change_is_one_line_whatever_line_breaks_its_json_has(text: str) -> None:
    """A spool is divided into changes at its line breaks."""
    line = line_of("c", key={"id": "x\ny"}, after=msgspec.Raw(text.encode()), place="a\nb:1")
    assert b"\n" not in line
    found = msgspec.json.decode(line)
    assert found["a"] == msgspec.json.decode(text)
    assert (found["k"], found["w"]) == ({"id": "x\ny"}, "a\nb:1")
