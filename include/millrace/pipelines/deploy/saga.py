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
"""The steps of section 3.1.1 of reference document 004."""


class Do(NamedTuple):
    """The next action. `things` are the step's plan."""

    what: Literal["plan", "make", "undo"]
    step: str
    things: tuple[str, ...] = ()


Finished: TypeAlias = Literal["ready", "gone"]


@dataclass(frozen=True, slots=True)
class Saga:
    """The state of a creation or deletion. `at` counts the completed steps."""

    at: int = 0
    back: bool = False
    """Whether it undoes, because a step failed (`cause`) or the pipeline is being deleted."""
    planned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cause: str = ""
    code: str = ""
    who: str = ""

    def next(self) -> Do | Finished:
        """Return the next action, or how the saga ended."""
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
        """Return the saga after its next action. `things` are the result of a plan."""
        did = self.next()
        assert isinstance(did, Do)
        if did.what == "plan":
            return replace(self, planned={**self.planned, did.step: things})
        if did.what == "make":
            return replace(self, at=self.at + 1)
        left = {step: found for step, found in self.planned.items() if step != did.step}
        return replace(self, at=self.at - 1, planned=left)

    def failed(self, code: str, cause: str) -> Self:
        """Return the saga after a failure to plan or make a step. The step and those before it are then undone."""
        assert not self.back
        return replace(self, back=True, code=code, cause=cause[:2000])

    def deleting(self, who: str) -> Self:
        """Return the saga that undoes everything that was created."""
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
