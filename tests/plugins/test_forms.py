"""A parameter class becomes a form: what a person sees and what Airflow checks is what the class says."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest
from airflow.sdk import Param
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import ParamValidationError
from pydantic import Field

from millrace.base.errors import InvalidArgument
from millrace.coord.catalog.store import CatalogStore
from millrace.message.schema import CollectionSchema, FieldSpec
from millrace.operations.operation import OperationParams
from millrace.operations.restore.declaration import RestoreParams
from millrace_airflow.forms import form, values
from tests.coord.catalog_rig import add_collection, finish


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Sample(OperationParams):
    count: int = Field(3, ge=1, le=10, description="How many.")
    share: float = Field(0.5, gt=0, lt=1, description="Which share.")
    mode: Literal["plain", "bold"] = Field("plain", description="How.")
    colour: Colour = Field(Colour.RED, description="Which colour.")
    start: datetime | None = Field(None, description="From when.")
    choice: Literal["a", "b"] | None = Field(None, description="One or none.")
    names: list[str] = Field(default_factory=lambda: ["x"], description="Which.", min_length=1)
    dry_run: bool = Field(False, description="Only say.", json_schema_extra={"section": "Safety"})


class Asking(OperationParams):
    name: str = Field(description="Which one.", min_length=1)


def test_a_field_has_its_type_bounds_words_and_default() -> None:
    count = form(Sample)["count"]
    assert (count.value, count.description) == (3, "How many.")
    assert (count.schema["type"], count.schema["minimum"], count.schema["maximum"]) == ("integer", 1, 10)
    assert form(Sample)["share"].schema["exclusiveMinimum"] == 0


def test_the_fields_are_in_the_order_of_the_class() -> None:
    assert list(form(Sample)) == list(Sample.model_fields)


def test_choices_are_an_enumeration_however_they_are_written() -> None:
    made = form(Sample)
    assert made["mode"].schema["enum"] == ["plain", "bold"]
    assert made["colour"].schema["enum"] == ["red", "blue"]
    assert made["choice"].schema["enum"] == ["a", "b", None]
    assert made["colour"].value == "red"


def test_an_optional_moment_is_a_date_with_time_or_nothing() -> None:
    start = form(Sample)["start"]
    assert start.schema["type"] == ["string", "null"]
    assert start.schema["format"] == "date-time"
    assert start.resolve(None) is None
    assert start.resolve("2026-11-21T12:00:00Z")
    with pytest.raises(InvalidArgument):  # Airflow checks no formats here; the class does, before anything starts
        Sample.parse({"start": "yesterday"})


def test_every_default_passes_its_own_check() -> None:
    ParamsDict(form(Sample)).validate()


@pytest.mark.parametrize(("name", "value"), [("count", 11), ("mode", "italic"), ("names", []), ("dry_run", "maybe")])
def test_what_the_class_refuses_the_form_refuses(name: str, value: object) -> None:
    with pytest.raises(ParamValidationError):
        form(Sample)[name].resolve(value)


def test_a_field_without_a_default_must_be_filled_in() -> None:
    with pytest.raises(ParamValidationError, match="No value passed"):
        form(Asking)["name"].resolve()


def test_a_dag_may_have_other_defaults_and_a_section() -> None:
    made = form(Sample, section="What", count=7, start=datetime(2026, 1, 1, tzinfo=UTC))
    assert made["count"].value == 7
    assert made["start"].value == "2026-01-01T00:00:00Z"
    assert made["count"].schema["section"] == "What"
    assert made["dry_run"].schema["section"] == "Safety"
    with pytest.raises(TypeError, match="has no colour_of"):
        form(Sample, colour_of="x")


def test_what_a_run_was_given_is_taken_by_the_class_again() -> None:
    given = {name: param.value for name, param in form(Sample).items()} | {"of_another_task": 1}
    assert Sample.parse(values(Sample, given)) == Sample()
    assert isinstance(form(Sample)["count"], Param)


class Choosing(OperationParams):
    collection: str = Field("", description="Which.", json_schema_extra={"choices": "collections"})
    several: tuple[str, ...] = Field((), description="Which.", json_schema_extra={"choices": "collections"})
    table: str = Field("", description="Which.", json_schema_extra={"choices": "derived tables"})


def test_collections_and_derived_tables_are_suggested_and_what_comes_later_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DATA", str(tmp_path))
    assert form(Choosing)["collection"].schema["examples"] == []
    assert not list(tmp_path.iterdir()), "a form makes nothing"
    store = CatalogStore(tmp_path / "coord" / "coord.db")
    schema = CollectionSchema((FieldSpec("id", "int64", False),), "id")
    for name in ("users", "orders"):
        finish(store, add_collection(store, name, schema))
    store.close()
    made = form(Choosing)
    assert made["collection"].schema["examples"] == made["several"].schema["examples"] == ["orders", "users"]
    assert made["table"].schema["examples"] == []
    (tmp_path / "derived" / "flights_hourly").mkdir(parents=True)
    assert form(Choosing)["table"].schema["examples"] == ["flights_hourly"]
    made["collection"].value = "made later"
    assert made["collection"].resolve() == "made later"


@pytest.mark.parametrize(
    "moment", ["", "470654881634713600", "2026-11-21", "2026-11-21T12:00:00Z", "2026-11-21 12:00+02:00"]
)
def test_a_moment_of_a_form_is_checked_before_a_run_begins(moment: str) -> None:
    param = form(RestoreParams)["at"]
    param.value = moment
    assert param.resolve() == moment


@pytest.mark.parametrize("moment", ["yesterday", "2026-13-01", "2026-11-32", "2026-11-21T25:00", "21.11.2026", "-1"])
def test_a_moment_that_is_none_never_becomes_a_run(moment: str) -> None:
    param = form(RestoreParams)["at"]
    param.value = moment
    with pytest.raises(ParamValidationError):
        param.resolve()
    with pytest.raises(InvalidArgument):
        RestoreParams.parse({"collection": "c", "into": "d", "at": moment})
