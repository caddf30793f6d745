"""The declaration of a folder whose files are read as they appear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from millrace.base.errors import InvalidArgument
from millrace.client.produce.files.formats import CsvOptions, InputFormat
from millrace.flows.declare.part import Part, words
from millrace.flows.kinds import SourceKind
from millrace.message.field_types import parse_type

ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class Csv(Part):
    """The form of CSV files."""

    delimiter: str = words("one character; for .tsv files the default is a tab", default=",")
    quote: str = words("one character; empty: no quoting", default='"')
    header: bool = words("whether the first line names the columns; otherwise `columns` does", default=True)
    encoding: str = words("", default="utf-8", max_length=40)
    nulls: tuple[str, ...] = words("cells that mean null", default=("",), max_length=20)
    decimal: Literal[".", ","] = words("the decimal mark", default=".")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        try:
            self.options("a.csv")
        except InvalidArgument as error:
            raise ValueError(str(error)) from None
        return self

    def options(self, name: str) -> CsvOptions:
        """Return the options of the file `name`."""
        tabs = self.delimiter == "," and PurePath(name.lower()).with_suffix("").suffix == ".tsv"
        tabs = tabs or (self.delimiter == "," and name.lower().endswith(".tsv"))
        return CsvOptions(
            delimiter="\t" if tabs else self.delimiter,
            quote=self.quote,
            header=self.header,
            encoding=self.encoding,
            nulls=self.nulls,
            decimal=self.decimal,
        )


class FilesSource(Part):
    """The rows of the files of a folder, each file once. One task."""

    kind: Literal["files"] = "files"
    folder: str = words(
        "the folder in which files appear, an absolute path", min_length=1, max_length=4096, pattern=r"^/"
    )
    pattern: str = words("the files to read, as a shell pattern below the folder", default="**/*", min_length=1,
                         max_length=500, pattern=r"^[^/\x00][^\x00]*$")  # fmt: skip
    format: InputFormat | None = words("the form of their rows; empty: by the suffix of each file", default=None)
    csv: Csv = words("the form of CSV files", default_factory=Csv)
    columns: dict[ColumnName, str] = words(
        "types of columns by name, as in a collection; the others are inferred", default_factory=dict,
        max_length=1000,
    )  # fmt: skip
    key: Annotated[tuple[ColumnName, ...], Field(max_length=16)] = words("columns of a record's key", default=())
    settle_seconds: float = words(
        "seconds without a change of size and time after which a file is complete", default=2, ge=0, le=86_400
    )
    changed: Literal["letter", "read"] = words(
        "if a file changes after it was read: write a dead letter, or read all of it again",
        default="letter",
    )
    after: Literal["keep", "delete"] = words("what to do with a file that was read", default="keep")
    start: Literal["earliest", "latest"] = words("existing files first, or only new ones", default="earliest")
    every_seconds: float = words(
        "longest pause between scans; with the system's notifications, changes are seen at once", default=5, ge=0.05,
        le=86_400,
    )  # fmt: skip
    page_rows: int = words("rows that are stored at once", default=5_000, ge=1, le=1_000_000)
    spool_mib: int = words(
        "size of rows that wait for the flow; when it is reached, reading pauses", default=1024, ge=1, le=1 << 20
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, kind in self.columns.items():
            try:
                parse_type(kind)
            except InvalidArgument as error:
                raise ValueError(f"columns.{name}: {error}") from None
        if not self.csv.header and not self.columns:
            raise ValueError("columns: CSV files without a header need them, in their order")
        if ".." in PurePath(self.pattern).parts:
            raise ValueError("pattern: it must stay below the folder")
        if len(set(self.key)) < len(self.key):
            raise ValueError("key: a column occurs twice")
        return self

    def local_paths(self) -> Iterator[tuple[str, str]]:
        yield "folder", self.folder

    @property
    def names(self) -> tuple[str, ...]:
        """The topic of its lane."""
        return (PurePath(self.folder).name or "files",)

    @property
    def name(self) -> str:
        """Its name in lists and graphs."""
        return self.folder

    @property
    def words(self) -> str:
        """Its location, for messages."""
        return f"the folder {self.folder}"


KIND: Final = SourceKind(
    "files",
    FilesSource,
    "millrace.flows.sources.files.watching:source_of",
    "millrace.flows.sources.files.watching:reader_of",
    tables=True,
    ordered_by_key=True,
    feeder="millrace.flows.sources.files.watching:feeder_of",
)
