"""The creation and deletion of a pipeline: steps in order, each planned, made, and undone if a later one fails.

Pure: it computes the next step and the state after it; `runner.py` executes them. A step is planned before it is made:
the plan lists what does not exist yet, which the step may create and later undo. The plan is stored before anything is
created, so that a successor after a crash knows what may exist, and nothing else is ever undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

STEPS: Final = ("permission", "account", "index_base", "topics", "resource_policy", "deployment")
"""As reference document 004 has them, section 3.1.1."""


class Do(NamedTuple):
    """What is next: `things` are what the step planned."""

    what: Literal["plan", "make", "undo"]
    step: str
    things: tuple[str, ...] = ()


Finished: TypeAlias = Literal["ready", "gone"]


@dataclass(frozen=True, slots=True)
class Saga:
    """Where it is. `at` counts the steps that are made."""

    at: int = 0
    back: bool = False
    """It undoes: since a step failed (`cause`), or since the pipeline is deleted."""
    planned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cause: str = ""
    code: str = ""
    who: str = ""

    def next(self) -> Do | Finished:
        """What is to be done now."""
        if self.back:
            if self.at < 0:
                return "gone"
            step = STEPS[self.at]
            return Do("undo", step, tuple(self.planned.get(step, ())))
        if self.at == len(STEPS):
            return "ready"
        step = STEPS[self.at]
        return Do("make", step, tuple(self.planned[step])) if step in self.planned else Do("plan", step)

    def done(self, things: tuple[str, ...] = ()) -> Self:
        """Behind what was next; `things` are a plan's."""
        did = self.next()
        assert isinstance(did, Do)
        if did.what == "plan":
            return replace(self, planned={**self.planned, did.step: things})
        if did.what == "make":
            return replace(self, at=self.at + 1)
        left = {step: found for step, found in self.planned.items() if step != did.step}
        return replace(self, at=self.at - 1, planned=left)

    def failed(self, code: str, cause: str) -> Self:
        """The step cannot be planned or made: it, as far as it came, and those before it are undone."""
        assert not self.back
        return replace(self, back=True, code=code, cause=cause[:2000])

    def deleting(self, who: str) -> Self:
        """Undo all that was made."""
        return replace(self, at=min(self.at, len(STEPS) - 1), back=True, who=who, cause="", code="")

    def to_json(self) -> dict[str, Any]:
        planned = {step: list(things) for step, things in self.planned.items()}
        return {
            "at": self.at,
            "back": self.back,
            "planned": planned,
            "cause": self.cause,
            "code": self.code,
            "who": self.who,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        planned = {step: tuple(things) for step, things in value.get("planned", {}).items()}
        return cls(**{**value, "planned": planned})
