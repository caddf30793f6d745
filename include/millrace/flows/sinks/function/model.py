"""The declaration of a sink that is a function of a micro-batch."""

from __future__ import annotations

from typing import ClassVar, Literal

from millrace.flows.declare.part import Part, words
from millrace.flows.declare.rows import Function


class FunctionSink(Part):
    """A function that is called with each micro-batch's DataFrame and number. For rows only."""

    of_rows: ClassVar = frozenset({"function"})

    kind: Literal["function"] = "function"
    function: Function = words("the function, or module:function")

    @property
    def target(self) -> str:
        """Its name in lists and graphs."""
        return f"function:{self.function}"
