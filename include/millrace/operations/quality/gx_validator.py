"""Runs one suite on one frame with Great Expectations. The only module that imports the library, and only at run time.

It returns plain results and, on request, writes the Data Docs. Analytics and progress bars are disabled before the
import. The context is in memory, because results are kept in a table of our own.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from millrace.base.errors import InvalidSuite
from millrace.operations.quality.checks import Check, CheckResult, TableCheckResult

if TYPE_CHECKING:
    from millrace.operations.quality.frames import ValidationInput

SITE: Final = "millrace"
MAX_TEXT_CHARACTERS: Final = 4_000
"""Maximum length of a stored observed value, sample value or error."""


class Validator:
    """One run: an in-memory context to which each frame's suite is added. Valid as long as the Spark session."""

    def __init__(self, *, docs: Path | None, samples: int) -> None:
        # Great Expectations reads this on import, so it must be set first.
        os.environ["GX_ANALYTICS_ENABLED"] = "false"
        import great_expectations as gx

        for name in ("great_expectations", "great_expectations.data_context.types.base"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._gx: Any = gx
        self._context = cast(Any, gx.get_context(mode="ephemeral"))
        self._context.variables.progress_bars = {"globally": False, "metric_calculations": False}
        self._context.enable_analytics(False)
        self._source: Any = self._context.data_sources.add_spark("millrace", persist=False)
        self._samples = samples
        self._docs = docs
        if docs is not None:
            docs.mkdir(parents=True, exist_ok=True)
            self._context.add_data_docs_site(
                site_name=SITE,
                site_config={
                    "class_name": "SiteBuilder",
                    "show_how_to_buttons": False,
                    "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs)},
                    "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
                },
            )

    def check(self, frame: ValidationInput, *, run_id: str) -> TableCheckResult:
        """Validate one frame with its suite. A check that cannot run is a result with an error, not an exception."""
        started = time.perf_counter()
        data = frame.data.persist()
        try:
            rows = data.count()
            outcomes = self._run(frame, data, run_id, rows)
        finally:
            data.unpersist()
        return TableCheckResult(
            frame.table, dict(frame.ranges), outcomes, frame.collection_id, time.perf_counter() - started, rows
        )

    def write_docs(self) -> Path | None:
        """Write the pages of this run and return the index page, or None if the run has no Data Docs."""
        if self._docs is None:
            return None
        self._context.build_data_docs(site_names=[SITE])
        return self._docs / "index.html"

    def _run(self, frame: ValidationInput, data: Any, run_id: str, rows: int) -> tuple[CheckResult, ...]:
        gx = self._gx
        name = frame.table.replace("/", ".")
        suite = self._context.suites.add(
            gx.ExpectationSuite(name=name, expectations=[to_gx(each) for each in frame.checks])
        )
        batch = self._source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("range")
        definition = gx.ValidationDefinition(name=name, data=batch, suite=suite)
        definition = self._context.validation_definitions.add(definition)
        from great_expectations.core.run_identifier import RunIdentifier

        run = RunIdentifier(run_name=run_id)
        batch_parameters = {"dataframe": data}
        # A pass over all expectations is one aggregation. Samples cost a query each, so take them only after a failure.
        found = definition.run(batch_parameters=batch_parameters, result_format="BOOLEAN_ONLY", run_id=run)
        if not found.success:
            result_format = {
                "result_format": "SUMMARY",
                "partial_unexpected_count": self._samples,
                "unexpected_index_column_names": list(frame.row_id),
            }
            found = definition.run(batch_parameters=batch_parameters, result_format=result_format, run_id=run)
        by_name = {each.name: each for each in frame.checks}
        return tuple(_outcome(by_name[each.expectation_config.meta["name"]], each, rows) for each in found.results)


def to_gx(check: Check) -> dict[str, Any]:
    """Return the check as an expectation in Great Expectations' JSON."""
    return {
        "type": check.type,
        "kwargs": dict(check.kwargs),
        "meta": {"name": check.name, "notes": check.words},
        "severity": check.severity,
    }


def check_expectations(checks: Sequence[Check], *, where: str) -> None:
    """Raise InvalidSuite, with check and reason, if Great Expectations does not accept one of `checks`."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    for number, check in enumerate(checks):
        try:
            ExpectationConfiguration(
                type=check.type, kwargs=dict(check.kwargs), meta={"name": check.name}
            ).to_domain_obj()
        except Exception as error:  # the library's errors have no common type; each of them is an error in the file
            raise InvalidSuite(f"{where}: expectations[{number}] ({check.type}): {_first(str(error))}") from error


def _outcome(check: Check, found: Any, rows: int) -> CheckResult:
    result = found.result or {}
    error = _exception(found.exception_info)
    indexes = result.get("partial_unexpected_index_list")
    sample = indexes if indexes else result.get("partial_unexpected_list") or ()
    return CheckResult(
        check=check,
        success=bool(found.success) and not error,
        observed="" if result.get("observed_value") is None else _short(result["observed_value"]),
        elements=int(result.get("element_count") or rows),
        unexpected=int(result.get("unexpected_count") or 0),
        sample=tuple(_short(each) for each in sample),
        error=error,
    )


def _exception(info: Any) -> str:
    """Return the error message, from either of the two forms in which Great Expectations reports it."""
    if not info:
        return ""
    if "raised_exception" in info:
        return _first(str(info["exception_message"])) if info["raised_exception"] else ""
    raised = [each for each in info.values() if isinstance(each, dict) and each.get("raised_exception")]
    return "; ".join(dict.fromkeys(_first(str(each["exception_message"])) for each in raised))


def _first(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT_CHARACTERS]


def _short(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True)[:MAX_TEXT_CHARACTERS]
