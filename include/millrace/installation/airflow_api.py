"""The calls of an installation to its own Airflow over REST: health, DAGs, pausing. Every call has a deadline."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from datetime import datetime
from typing import Any, Final

from millrace.base.errors import AirflowUnavailable

CALL_SECONDS: Final = 10.0
ATTEMPTS: Final = 8
PAUSE_SECONDS: Final = 2.0
COMPONENTS: Final = ("metadatabase", "scheduler", "triggerer", "dag_processor")

_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores proxies of the environment: the address is on this machine."""


class AirflowApi:
    """A client of the Airflow at `address`. Calls that need a login use `user` and `password`."""

    def __init__(self, address: str, *, user: str, password: str) -> None:
        self._address = address.rstrip("/")
        self._login = {"username": user, "password": password}
        self._token = ""

    def health(self, *, since: float = 0.0) -> dict[str, str]:
        """Return the state of each component.

        The state is "healthy", "starting" (no heartbeat after `since`, in Unix seconds), or Airflow's own word. Raises
        AirflowUnavailable while Airflow does not answer.
        """
        found = self._call("GET", "/api/v2/monitor/health")
        return {name: _state(found.get(name) or {}, f"latest_{name}_heartbeat", since) for name in COMPONENTS}

    def login(self) -> None:
        """Get a token. Raises AirflowUnavailable, with status 401 for a wrong password."""
        self._token = str(self._call("POST", "/auth/token", self._login)["access_token"])

    def has_dag(self, dag_id: str) -> bool:
        """Return whether Airflow has parsed the DAG."""
        try:
            self.call("GET", f"/api/v2/dags/{dag_id}")
        except AirflowUnavailable as error:
            if error.status != 404:
                raise
            return False
        return True

    def set_paused(self, dag_id: str, paused: bool) -> None:
        """Pause or unpause the DAG."""
        self.call("PATCH", f"/api/v2/dags/{dag_id}?update_mask=is_paused", {"is_paused": paused})

    def import_errors(self) -> list[str]:
        """Return the DAG files that cannot be imported, each with the last line of its error."""
        found = self.call("GET", "/api/v2/importErrors")["import_errors"]
        return [f"{each['filename']}: {str(each['stack_trace']).strip().splitlines()[-1]}" for each in found]

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Make an authenticated, repeatable call; repeat it on failure.

        Airflow's database is locked now and then while Airflow parses its DAGs. Raises AirflowUnavailable with the
        status of Airflow's answer (None: no answer).
        """
        for left in reversed(range(ATTEMPTS)):
            try:
                if not self._token:
                    self.login()
                return self._call(method, path, body)
            except AirflowUnavailable as error:
                if error.status == 401 and self._token and left:
                    self._token = ""  # the token has expired
                elif error.status is not None and error.status >= 500 and left:
                    time.sleep(PAUSE_SECONDS)
                else:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self._token}"} if self._token else {}
        )
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data=data, headers=headers, method=method)
        try:
            with _DIRECT.open(request, timeout=CALL_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(2000).decode(errors="replace")
            raise AirflowUnavailable(
                f"{method} {path}: Airflow answered {error.code}: {said}", status=error.code
            ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AirflowUnavailable(f"{method} {path}: no answer from {self._address} ({error})") from None


def _state(found: dict[str, Any], heartbeat: str, since: float) -> str:
    state = str(found.get("status") or "starting")
    if heartbeat not in found or state != "healthy":
        return state
    # Airflow reports a killed component as healthy for another half minute.
    return state if datetime.fromisoformat(found[heartbeat]).timestamp() >= since else "starting"
