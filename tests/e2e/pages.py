"""The pages in a browser as a person uses them: log in, click through every view, fill in a form, start it.

    python -m tests.e2e.pages ADDRESS PASSWORD FOLDER

takes the pictures of docs/images from a running system (after `make demo`) into FOLDER.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.e2e.browser import Page, browser

TABS: Final = {
    "Overview": "PChannels",
    "Collections": "Collections",
    "Pipelines": "Pipelines",
    "Transactions": "Ended",
    "Rejections": "Rejected messages",
    "Checkpoints": "Checkpoints and truncation",
    "Maintenance": "Operations",
    "Quality": "Expectations",
    "Actions": "Actions",
    "API": "REST API",
}
"""Each tab of the pages, and a heading that stands there."""
VIEWS: Final = {"Schema": "Fields", "Rows": "_time_tick", "Segments": "Sealed by", "Files": ".parquet"}
FRAME: Final = "document.querySelector('iframe').contentDocument"


def log_in(page: Page, address: str, password: str) -> None:
    """Through Airflow's own form."""
    page.open(address, ready="document.querySelector('input[name=username]')")
    page.type("document.querySelector('input[name=username]')", "admin")
    page.type("document.querySelector('input[name=password]')", password)
    page.click("document.querySelector('button[type=submit]')")
    page.wait(
        "!location.pathname.startsWith('/auth') && document.querySelector('nav, [role=navigation], a[href*=dags]')"
    )


def link(words: str, *, within: str = "document") -> str:
    """The link or button with exactly these words."""
    return f"[...{within}.querySelectorAll('a, button')].find((each) => each.innerText.trim() === {json.dumps(words)})"


def tab(page: Page, name: str) -> None:
    """Click a tab of the pages, and wait until it is there."""
    words = json.dumps(name)
    page.click(f"[...document.querySelectorAll('nav.tabs a')].find((each) => each.innerText.startsWith({words}))")
    page.wait(
        f"(document.querySelector('nav.tabs a[aria-current]')?.innerText || '').startsWith({words})"
        f" && document.readyState === 'complete' &&"
        f" document.querySelector('main').innerText.includes({json.dumps(TABS[name])})",
        what=f"the tab {name} shows {TABS[name]!r}",
    )


def start(page: Page, button: str, **values: str) -> str:
    """Open the form of an action, fill in fields by their parameters' names, start it; the path of its run."""
    page.click(button)
    page.wait("document.querySelector('dialog#start[open] button[type=submit]')")
    for name, value in values.items():
        field = f"document.getElementById('param-{name}')"
        page.evaluate(f"{field}.closest('details') && ({field}.closest('details').open = true)")
        if value in ("on", "off"):
            if page.evaluate(f"{field}.checked") != (value == "on"):
                page.click(field)
        else:
            page.type(field, value)
    page.click("document.querySelector('dialog#start button[type=submit]')")
    return str(page.wait("document.querySelector('#notice a')?.getAttribute('href')", what="the run was started"))


def pictures(page: Page, address: str, folder: Path) -> None:
    """What docs/images shows: the system as it is now, light and dark."""
    folder.mkdir(parents=True, exist_ok=True)
    root = f"{address}/millrace"

    def take(name: str, path: str, *, theme: str = "light", height: int = 800) -> None:
        page.size(1280, height)
        page.theme(theme)
        page.evaluate(f"localStorage.setItem('theme', '{theme}')")
        page.open(f"{root}{path}", ready="document.readyState === 'complete' && document.querySelector('main')")
        page.wait("[...document.querySelectorAll('svg[data-series]')].every((each) => each.childElementCount)")
        page.picture(folder / f"{name}.png")

    for theme in ("light", "dark"):
        take(f"ui-overview-{theme}", "/?window=15m", theme=theme, height=1000)
    take("ui-collection", "/collections/flights", height=900)
    take("ui-rows", "/collections/flights?view=rows")
    take("ui-segments", "/collections/flights?view=segments", theme="dark", height=640)
    take("ui-transactions", "/transactions", height=640)
    take("ui-rejections", "/rejections", height=640)
    page.click("document.querySelector('#found a.id[href*=messages], main a[href*=\"/messages/\"]')")
    page.wait("document.body.innerText.includes('Payload') && document.querySelector('h1')")
    page.picture(folder / "ui-message.png")
    take("ui-checkpoints", "/checkpoints", height=640)
    take("ui-maintenance", "/maintenance", theme="dark", height=900)
    take("ui-quality", "/quality", height=800)
    take("ui-actions", "/actions", height=560)
    take("ui-action", "/collections/flights")
    page.click(link("Restore…"))
    page.wait("document.querySelector('dialog#start[open] button[type=submit]')")
    page.type("document.getElementById('param-into')", "flights_then")
    page.picture(folder / "ui-action.png")
    page.size(1366, 860)
    page.theme("dark")
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.open(f"{address}/plugin/millrace", ready=f"{FRAME}.querySelector('svg[data-series]')?.childElementCount")
    page.picture(folder / "ui-airflow-dark.png")
    page.evaluate("localStorage.setItem('theme', 'light')")
    page.open(f"{address}/dags/streaming", ready="document.body.innerText.includes('streaming')")
    page.picture(folder / "airflow-streaming.png")


def main() -> int:
    address, password, folder = sys.argv[1:4]
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        log_in(page, address, password)
        pictures(page, address, Path(folder))
        for error in page.errors:
            print(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
