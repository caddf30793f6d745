"""The form that starts an action: generated from the DAG's own parameters, and processed on the server.

It needs no JavaScript; with it, the same form opens in a dialog (static/actions.js). Airflow's REST API is called in
this process with the user's credentials, so Airflow checks permission and parameters and stores the run.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, quote

import httpx
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from millrace.observe.observer import Observer
from millrace_airflow.ui.access import Reader, may_trigger
from millrace_airflow.ui.actions import ACTIONS, RUN_ID
from millrace_airflow.ui.middleware import AIRFLOW
from millrace_airflow.ui.pages import Renderer
from millrace_airflow.ui.text import picked, pretty

ATTEMPTS: Final = 4
"""Tries to start a run: Airflow's database may be locked for a moment. They share one run id, so one run starts."""
PAUSE_SECONDS: Final = 1.0
_CREDENTIALS: Final = ("authorization", "cookie")
_ZONE: Final = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_STATUS_WORDS: Final = {
    401: "You are logged out.",
    403: "You may not do this.",
    404: "Airflow has no such DAG (yet).",
    409: "This form has started its run already: open it again for another one.",
}

Title = Annotated[str, Query(max_length=60)]
Conf = Annotated[str, Query(max_length=20_000)]


class Refused(Exception):
    """Airflow's refusal of a call: its status, its text, and the problems by field."""

    def __init__(self, status: int, words: str, problems: Sequence[Mapping[str, str]] = ()) -> None:
        super().__init__(words)
        self.status = status
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter of a DAG as a field of the form."""

    name: str
    kind: str
    """``flag``, ``choice``, ``choices``, ``lines``, ``object``, ``number``, ``moment``, ``tick`` or ``text``."""
    title: str
    note: str
    texts: tuple[str, ...]
    """The content of its input: the chosen options, or one text; for ``tick``, the picker's text and the tick's."""
    options: tuple[tuple[str, str], ...] = ()
    """(value, label) of each option of a choice, and the suggestions for a text."""
    types: tuple[str, ...] = ()
    pattern: str = ""
    first: bool = False
    """Whether it is shown at once. Other fields are folded."""

    @classmethod
    def of(cls, name: str, parameter: Mapping[str, Any], conf: Mapping[str, Any]) -> Field:
        """Return the field of a parameter in Airflow's form, with `conf` overriding its default."""
        schema = parameter.get("schema") or {}
        value = conf.get(name, parameter.get("value"))
        types = _types(schema)
        kind = _kind(schema, types)
        examples = [str(each) for each in schema.get("examples") or ()]
        bounds = (("from", schema.get("minimum")), ("to", schema.get("maximum")))
        note = parameter.get("description") or schema.get("description") or ""
        chosen_first = isinstance(schema.get("examples"), list) and not schema.get("section")
        required = "null" not in types and kind != "flag" and bool(types) and value in (None, "")
        if kind == "choice":
            options = tuple((json.dumps(each), "none" if each is None else str(each)) for each in schema["enum"])
        else:
            chosen = value if kind == "choices" and value else ()
            options = tuple((each, each) for each in dict.fromkeys([*examples, *chosen]))
        return cls(
            name=name,
            kind=kind,
            title=schema.get("title") or name.replace("_", " "),
            note=" ".join([note, *(f"{word} {bound}" for word, bound in bounds if bound is not None)]).strip(),
            texts=_texts(kind, value),
            options=options,
            types=types,
            pattern=schema.get("pattern") or "",
            first=name in conf or name == "dry_run" or required or chosen_first,
        )

    def filled_in(self, sent: Mapping[str, Sequence[str]]) -> Field:
        """Return the field with the submitted values."""
        texts = tuple(sent.get(f"param.{self.name}", ()))
        if self.kind == "tick":
            texts = (*(texts or ("",)), *sent.get(f"param.{self.name}.tick", ("",)))
        elif self.kind not in ("flag", "choices"):
            texts = texts or ("",)
        return replace(self, texts=texts)

    def value(self) -> Any:
        """Return the field's value. Raises ValueError with what is wrong, for the user."""
        match self.kind:
            case "flag":
                return bool(self.texts)
            case "choices":
                return list(self.texts)
            case "choice":
                known = {value for value, _ in self.options}
                if self.texts[0] not in known:
                    raise ValueError("Choose one of the options.")
                return json.loads(self.texts[0])
        text = self.texts[0].strip()
        match self.kind:
            case "lines" if not text.startswith("["):
                return [each.strip() for each in text.splitlines() if each.strip()]
            case "lines" | "object":
                return _json(text) if text else None
            case "number":
                return _number(text, self.types) if text else None
            case "moment" | "tick":
                return self._moment(text)
        text = self.texts[0]
        if text == "" and "null" in self.types:
            return None
        if self.pattern and not re.search(self.pattern, text):
            raise ValueError(f"“{text}” does not fit.")
        return text

    def _moment(self, text: str) -> str | None:
        tick = self.texts[1].strip() if self.kind == "tick" else ""
        if tick or text:
            moment = f"{text}:00" if len(text) == len("2026-01-01T00:00") else text
            return tick or (moment if _ZONE.search(moment) else f"{moment}Z")
        if "null" in self.types:
            return None
        if self.kind == "tick":
            return ""
        raise ValueError("Choose a moment.")


def fields_of(details: Mapping[str, Any], conf: Mapping[str, Any]) -> list[Field]:
    """Return the fields of a DAG's form, from Airflow's details of the DAG."""
    return [Field.of(name, parameter, conf) for name, parameter in (details.get("params") or {}).items()]


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for each in (schema, *(schema.get("anyOf") or ())):
        kind = each.get("type") or []
        found += [kind] if isinstance(kind, str) else kind
    return tuple(found)


def _kind(schema: Mapping[str, Any], types: Sequence[str]) -> str:
    if "boolean" in types:
        return "flag"
    if isinstance(schema.get("enum"), list):
        return "choice"
    if "array" in types:
        return "choices" if schema.get("examples") else "lines"
    if "object" in types:
        return "object"
    if "integer" in types or "number" in types:
        return "number"
    return {"date-time": "moment", "tick-or-date-time": "tick"}.get(schema.get("format") or "", "text")


def _texts(kind: str, value: Any) -> tuple[str, ...]:
    match kind:
        case "flag":
            return ("on",) if value else ()
        case "choice":
            return (json.dumps(value),)
        case "choices":
            return tuple(str(each) for each in value or ())
        case "lines" if not isinstance(value, list) or all(isinstance(each, str) for each in value):
            return ("\n".join(value or ()),)
        case "lines" | "object":
            return (pretty(value) if value else "",)
        case "moment" | "tick":
            text = str(value or "")
            return ("", text) if text.isdigit() else ((picked(text) or "")[:19], "")
    return ("" if value is None else str(value),)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"This is not JSON: {error}.") from None


def _number(text: str, types: Sequence[str]) -> float | int:
    try:
        found = float(text)
        if found - found != 0:  # not finite
            raise ValueError
    except ValueError:
        raise ValueError(f"A number, not “{text}”.") from None
    try:
        return int(text)
    except ValueError:
        return int(found) if found.is_integer() and "integer" in types else found


async def ask_airflow(request: Request, method: str, path: str, value: Any = None) -> Any:
    """Call Airflow's REST API with the credentials of `request`, in this process. Raises Refused."""
    transport = httpx.ASGITransport(app=request.scope[AIRFLOW], raise_app_exceptions=False)
    headers = {name: request.headers[name] for name in _CREDENTIALS if name in request.headers}
    async with httpx.AsyncClient(transport=transport, base_url=str(request.base_url)) as client:
        url = request.base_url.replace(path=f"/api/v2{path}", query="")
        answer = await client.request(method, str(url), json=value, headers=headers)
    try:
        found = answer.json()
    except ValueError:
        found = None
    if answer.is_success:
        return found
    detail = found.get("detail") if isinstance(found, dict) else None
    if isinstance(detail, list):
        detail = "; ".join(str(each.get("msg", each)) for each in detail)
    words = _STATUS_WORDS.get(answer.status_code, f"Airflow answered {answer.status_code}.")
    if detail and answer.status_code not in (404, 409):  # Airflow's texts for these are about its database
        words = detail if isinstance(detail, str) else json.dumps(detail)
    raise Refused(answer.status_code, words, (found.get("problems") or ()) if isinstance(found, dict) else ())


def router(observer: Observer, renderer: Renderer) -> APIRouter:
    """Return the routes of ``/actions/<DAG>``: the form, and the start."""
    made = APIRouter(include_in_schema=False)

    def show(request: Request, user: BaseUser, dag: str, wrong: Mapping[str, str], **values: Any) -> Response:
        return renderer.page(
            request, "start.html",
            status=422 if wrong else 200,
            tab="actions", overview=observer.overview(), allowed=may_trigger(user, dag), dag=dag, wrong=wrong, **values,
        )  # fmt: skip

    @made.get("/actions/{dag}")
    async def form(request: Request, user: Reader, dag: str, title: Title = "", conf: Conf = "") -> Response:
        details = await _details(request, dag)
        values = {"title": title or _title(dag), "conf": conf, "fields": fields_of(details, _conf(conf))}
        run = f"manual__{datetime.now(UTC).isoformat()}"
        return await run_in_threadpool(show, request, user, dag, {}, run=run, details=details, **values)

    @made.post("/actions/{dag}")
    async def start(request: Request, user: Reader, dag: str, title: Title = "", conf: Conf = "") -> Response:
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise HTTPException(403, "A form of another site cannot start anything here.")
        sent = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=1000)
        details = await _details(request, dag)
        fields = [each.filled_in(sent) for each in fields_of(details, _conf(conf))]
        run = sent.get("run", [""])[0]
        if not RUN_ID.fullmatch(run):
            raise HTTPException(422, "The form has no run id: open it again.")
        wrong, values = _read(fields)
        if not wrong:
            try:
                if details.get("is_paused") and "unpause" in sent:
                    path = f"/dags/{quote(dag, safe='')}?update_mask=is_paused"
                    await ask_airflow(request, "PATCH", path, {"is_paused": False})
                await _begin(
                    lambda: ask_airflow(
                        request,
                        "POST",
                        f"/dags/{quote(dag, safe='')}/dagRuns",
                        {"dag_run_id": run, "logical_date": None, "conf": values},
                    )
                )
            except Refused as refused:
                wrong = _by_field(refused, fields)
        if wrong:
            found = {"title": title or _title(dag), "conf": conf, "fields": fields}
            return await run_in_threadpool(show, request, user, dag, wrong, run=run, details=details, **found)
        root = request.scope.get("root_path", "")
        return RedirectResponse(f"{root}/actions?started={quote(dag)}&run={quote(run)}", status_code=303)

    return made


async def _details(request: Request, dag: str) -> Mapping[str, Any]:
    """Return Airflow's details of a DAG. Raises HTTPException."""
    try:
        found: Mapping[str, Any] = await ask_airflow(request, "GET", f"/dags/{quote(dag, safe='')}/details")
    except Refused as refused:
        raise HTTPException(refused.status, str(refused)) from None
    return found


def _conf(text: str) -> dict[str, Any]:
    """Return the parameters that a button fills in. Raises HTTPException."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HTTPException(422, "conf: must be a JSON object")
    return found


def _read(fields: Sequence[Field]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the problems by field, and the values of the other fields."""
    wrong: dict[str, str] = {}
    values: dict[str, Any] = {}
    for each in fields:
        try:
            values[each.name] = each.value()
        except ValueError as error:
            wrong[each.name] = str(error)
    return wrong, values


def _by_field(refused: Refused, fields: Sequence[Field]) -> dict[str, str]:
    """Return the problems by field; under "" those of no field."""
    names = {each.name for each in fields}
    wrong: dict[str, str] = {}
    for each in refused.problems:
        name = each["field"].partition(".")[0]
        place = name if name in names else ""
        wrong[place] = "; ".join(filter(None, (wrong.get(place), each["message"])))
    wrong = wrong or {"": str(refused)}
    return wrong | {name: words[:1].upper() + words[1:] for name, words in wrong.items() if not name}


async def _begin(send: Callable[[], Awaitable[Any]]) -> None:
    """Start the run; a repeated call that finds the run started has succeeded. Raises Refused."""
    for left in range(ATTEMPTS - 1, -1, -1):
        try:
            await send()
        except Refused as refused:
            if refused.status == 409 and left < ATTEMPTS - 1:
                return
            if refused.status < 500 or not left:
                raise
            await asyncio.sleep(PAUSE_SECONDS)
        else:
            return


def _title(dag: str) -> str:
    return next((each.title for each in ACTIONS if each.dag_id == dag), dag)
