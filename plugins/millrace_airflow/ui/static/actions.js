// Opens the form of an action, which the server renders (start_forms.py), in a dialog, and sends it from there: without this
// script the same form is a page. Cancels runs through Airflow's REST API.
(function () {
  "use strict";
  const dialog = document.getElementById("start");

  async function page(address, options) {
    const answer = await fetch(address, { credentials: "same-origin", cache: "no-store", headers: { Accept: "text/html" }, ...options });
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  }

  function text(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // The form of a fetched page; what a page without a form says, such as an error.
  function put(found, title) {
    const form = found.querySelector("form.start");
    const words = found.querySelector("main")?.innerText.trim() || "The server did not answer.";
    dialog.replaceChildren(form ? document.adoptNode(form) : text("form", { className: "start" },
      text("header", {}, text("h2", { id: "start-title" }, title), text("p", {}, words)), text("div", { className: "fields" }),
      text("footer", {}, text("span", { className: "fill" }), Object.assign(text("a", { className: "button", href: "#" }, "Close"), { id: "close" }))));
    dialog.querySelector("#close")?.setAttribute("data-close", "");
    if (form) form.addEventListener("submit", (event) => { event.preventDefault(); send(form, title); });
    const first = dialog.querySelector("[aria-invalid], .fields input, .fields select, .fields textarea");
    first?.scrollIntoView({ block: "nearest" });
    first?.focus();
  }

  async function open(button) {
    const title = button.dataset.title || button.textContent.trim();
    put(new Document(), title);
    dialog.querySelector("header p").textContent = "Asking Airflow for its parameters…";
    dialog.showModal();
    try { put(await page(button.href), title); }
    catch (problem) { dialog.querySelector("header p").textContent = problem.message; }
  }

  async function send(form, title) {
    const start = form.querySelector("button.primary");
    start.disabled = true;
    try {
      const found = await page(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
      const run = found.querySelector("#started");
      if (!run) { put(found, title); return; }
      dialog.close();
      const link = run.querySelector("a");
      window.millrace.notice(run.firstChild.textContent.trim(), false, { words: link.textContent, href: link.getAttribute("href") });
    } catch (problem) {
      window.millrace.notice(problem.message, true);
      start.disabled = false;
    }
  }

  // Airflow marks the run as failed, and the job of a task that waits or runs is stopped.
  async function cancel(button) {
    const { cancel: run, cancelDag: dag } = button.dataset;
    button.disabled = true;
    try {
      const path = `/api/v2/dags/${encodeURIComponent(dag)}/dagRuns/${encodeURIComponent(run)}?update_mask=state`;
      const answer = await fetch(`${window.millrace.airflow}${path}`, {
        method: "PATCH", credentials: "same-origin", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ state: "failed" }),
      });
      const told = { 401: "You are logged out.", 403: "You may not do this.", 404: "Airflow has no such run." }[answer.status];
      if (!answer.ok) throw new Error(told || `Airflow answered ${answer.status}.`);
      window.millrace.notice(`Cancelled ${dag}.`);
    } catch (problem) {
      button.disabled = false;
      window.millrace.notice(problem.message, true);
    }
  }

  document.addEventListener("click", (event) => {
    const stop = event.target.closest?.("button[data-cancel]");
    if (stop && !stop.disabled) cancel(stop);
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    const button = event.target.closest?.("a[data-start]");
    if (button) { event.preventDefault(); open(button); }
    if (event.target.closest?.("#start [data-close]")) { event.preventDefault(); dialog.close(); }
  });
})();
