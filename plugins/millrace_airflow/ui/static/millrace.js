// Keeps a page fresh: fetches it again and puts the parts marked data-live in place, keeps relative times going, and leads
// from the frame inside Airflow to Airflow's own pages. No state of its own: what is shown is what the server rendered.
(function () {
  "use strict";
  const body = document.body;
  const every = Number(body.dataset.refresh) * 1000;
  const live = document.getElementById("live");
  let paused = false;
  let failures = 0;

  function relative(at) {
    const seconds = Date.now() / 1000 - at;
    const size = Math.abs(seconds);
    let words;
    if (size < 1.5) words = "now";
    else if (size < 60) words = `${Math.round(size)} s`;
    else if (size < 3600) words = `${Math.floor(size / 60)} min`;
    else if (size < 86400) words = `${Math.floor(size / 3600)} h ${Math.floor((size % 3600) / 60)} min`;
    else if (size < 30 * 86400) words = `${Math.floor(size / 86400)} d`;
    else return null;
    if (words === "now") return words;
    return seconds > 0 ? `${words} ago` : `in ${words}`;
  }

  function tellTimes() {
    for (const each of document.querySelectorAll("time[data-at]")) {
      const words = relative(Number(each.dataset.at));
      if (words !== null && each.textContent !== words) each.textContent = words;
    }
  }

  function put(fresh) {
    for (const part of document.querySelectorAll("[data-live]")) {
      const other = fresh.getElementById(part.id);
      if (other === null || part.dataset.was === other.innerHTML) continue;
      if (part.contains(document.activeElement) && document.activeElement !== document.body && part.querySelector(":focus")?.matches("input, select, textarea")) continue;
      const opened = [...part.querySelectorAll("details[open][id]")].map((each) => each.id);
      const scrolled = [...part.querySelectorAll(".scroll")].map((each) => [each.scrollLeft, each.scrollTop]);
      const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      part.dataset.was = other.innerHTML;
      part.replaceChildren(...other.cloneNode(true).childNodes);
      for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
      part.querySelectorAll(".scroll").forEach((each, place) => { if (scrolled[place]) [each.scrollLeft, each.scrollTop] = scrolled[place]; });
      if (focused !== null) [...part.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
    }
    tellTimes();
    document.dispatchEvent(new CustomEvent("millrace:fresh"));
  }

  function late(words) {
    live.classList.toggle("late", words !== "");
    body.classList.toggle("late", words !== "");
    live.lastChild.textContent = words || (paused ? "Paused" : "Live");
  }

  async function refresh() {
    if (paused || document.hidden || document.querySelector("dialog[open]")) return;
    try {
      const answer = await fetch(window.location.href, { headers: { Accept: "text/html" }, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) { paused = true; late("Logged out"); return; }
      if (!answer.ok) throw new Error(`${answer.status}`);
      put(new DOMParser().parseFromString(await answer.text(), "text/html"));
      failures = 0;
      late("");
    } catch (error) {
      failures += 1;
      if (failures > 1) late("No answer");
    }
  }

  async function loop() {
    await refresh();
    window.setTimeout(loop, Math.min(every * 2 ** failures, 30000));
  }

  if (every > 0) {
    live.hidden = false;
    live.addEventListener("click", () => {
      paused = !paused;
      live.setAttribute("aria-pressed", String(!paused));
      late("");
      if (!paused) refresh();
    });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
    window.setTimeout(loop, every);
  }
  tellTimes();
  window.setInterval(tellTimes, 1000);

  // Airflow shows these pages in a sandboxed frame, which may not move the window around it; its router can be told.
  window.millrace = {
    airflow: body.dataset.airflow,
    go(path) {
      if (window.parent === window) { window.location.assign(path); return; }
      try {
        window.parent.history.pushState({}, "", path);
        window.parent.dispatchEvent(new window.parent.PopStateEvent("popstate", { state: {} }));
      } catch (error) { window.location.assign(path); }
    },
    notice(words, bad, link) {
      const place = document.getElementById("notice");
      place.className = bad ? "bad" : "";
      place.replaceChildren(document.createTextNode(words));
      if (link) {
        const to = document.createElement("a");
        to.href = link.href; to.textContent = link.words; to.dataset.airflowPage = "";
        place.append(" ", to);
      }
      place.hidden = false;
      window.clearTimeout(this.fading);
      this.fading = window.setTimeout(() => { place.hidden = true; }, 15000);
    },
  };
  document.addEventListener("click", (event) => {
    const to = event.target.closest?.("a[data-airflow-page]");
    if (!to || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    window.millrace.go(to.getAttribute("href"));
  });
})();
