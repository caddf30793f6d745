// Pipelines: the form that makes or changes one, samples through its steps, and the redrive of its errors. All through the API of these pages.
(function () {
  "use strict";
  const call = (...asked) => window.millrace.call(...asked);
  const root = document.body.dataset.root;
  const part = encodeURIComponent;

  function make(name, properties, ...children) {
    const made = Object.assign(document.createElement(name), properties || {});
    made.append(...children);
    return made;
  }

  // --- the form ---------------------------------------------------------------------------------------------------

  function form(form) {
    let declaration = JSON.parse(form.dataset.declaration);
    const whole = form.querySelector("#whole"), problems = form.querySelector("#problems"), verdict = form.querySelector("#verdict");
    const inputs = [...form.querySelectorAll("[data-path]")];
    const open = (input) => input.closest("[hidden]") === null;

    function get(path) {
      return path.split(".").reduce((place, name) => (place !== null && typeof place === "object" ? place[name] : undefined), declaration);
    }
    function set(path, value) {
      const names = path.split("."), last = names.pop();
      let place = declaration;
      for (const name of names) {
        if (place[name] === null || typeof place[name] !== "object") { if (value === undefined) return; place[name] = {}; }
        place = place[name];
      }
      if (value === undefined) delete place[last]; else place[last] = value;
    }
    function show() {
      for (const group of form.querySelectorAll("[data-when]")) {
        const [path, value] = group.dataset.when.split("=");
        group.hidden = get(path) !== value;
      }
    }
    function fill() {
      for (const input of inputs) {
        const value = get(input.dataset.path), kind = input.dataset.kind;
        if (kind === "secret") continue;
        if (kind === "flag") input.checked = value === true;
        else if (kind === "list") input.value = Array.isArray(value) ? value.join("\n") : "";
        else if (kind === "json") input.value = value === undefined ? "[]" : JSON.stringify(value, null, 1);
        else if (input.tagName === "SELECT") input.value = value ?? input.options[0].value;
        else input.value = value === undefined || value === null ? "" : String(value);
      }
      show();
    }
    function write() { whole.value = JSON.stringify(declaration, null, 1); }

    // One thing that is wrong, beside the field that it is about, or above where there is none.
    function mark(found) {
      clear();
      for (const each of found) {
        const places = [...form.querySelectorAll("[data-for]")].filter((place) => place.dataset.for && place.closest("[hidden]") === null
          && (each.field === place.dataset.for || each.field.startsWith(`${place.dataset.for}.`)));
        places.sort((one, other) => other.dataset.for.length - one.dataset.for.length);
        const inner = places[0] && each.field !== places[0].dataset.for ? `${each.field}: ` : "";
        if (places[0]) {
          places[0].append(make("em", { className: "wrong" }, inner + each.message));
          places[0].querySelector("input, select, textarea").setAttribute("aria-invalid", "true");
        } else problems.append(make("li", {}, each.field ? `${each.field}: ${each.message}` : each.message));
      }
      problems.hidden = problems.childElementCount === 0;
      (form.querySelector("[aria-invalid]") || (problems.hidden ? null : problems))?.scrollIntoView({ block: "center" });
    }
    function clear() {
      form.querySelectorAll(".wrong").forEach((each) => each.remove());
      form.querySelectorAll("[aria-invalid]").forEach((each) => each.removeAttribute("aria-invalid"));
      problems.replaceChildren();
      problems.hidden = true;
      verdict.textContent = "";
    }
    function fail(error) {
      if (error.problems && error.problems.length) { mark(error.problems); verdict.textContent = `${error.problems.length} to mend.`; }
      else { mark([{ field: "", message: error.message }]); }
    }

    form.addEventListener("input", (event) => {
      const input = event.target, path = input.dataset.path;
      if (input === whole) {
        try { declaration = JSON.parse(whole.value); whole.removeAttribute("aria-invalid"); fill(); }
        catch (error) { whole.setAttribute("aria-invalid", "true"); }
        return;
      }
      if (!path || input.dataset.kind === "secret") return;
      const text = input.value.trim();
      if (input.dataset.kind === "flag") set(path, input.checked ? true : undefined);
      else if (input.dataset.kind === "list") set(path, text.split(/[\s,]+/).filter(Boolean));
      else if (input.dataset.kind === "number") set(path, text === "" ? undefined : Number.isNaN(Number(text)) ? text : Number(text));
      else if (input.dataset.kind === "json") {
        try { set(path, JSON.parse(text || "[]")); input.removeAttribute("aria-invalid"); }
        catch (error) { input.setAttribute("aria-invalid", "true"); return; }
      } else set(path, input.value === "" ? undefined : input.value);
      if (path === "source.kind" || path === "sink.kind") { set(path.split(".")[0], { kind: input.value }); fill(); }
      write();
    });

    function asked() {
      if (form.querySelector("textarea[aria-invalid]:is(#whole, [data-kind=json])")) throw new Error("What is marked is no JSON.");
      const made = structuredClone(declaration);
      const kept = declaration;
      declaration = made;
      for (const input of inputs) if (input.dataset.kind === "secret" && input.value && open(input)) set(input.dataset.path, input.value);
      declaration = kept;
      return made;
    }
    const id = () => form.dataset.id || form.querySelector("#pipeline-id").value.trim();
    function named() {
      if (/^[a-z0-9][a-z0-9-]{0,62}$/.test(id())) return true;
      mark([{ field: "id", message: "small letters, digits and -, at most 63" }]);
      return false;
    }

    form.querySelector("#check").addEventListener("click", async () => {
      if (!named()) return;
      try {
        const found = await call("PUT", `pipelines/${part(id())}/validate`, asked());
        clear();
        verdict.textContent = `Nothing is wrong with it. Its guarantee: ${found.guarantee}.`;
      }
      catch (error) { fail(error); }
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (!named()) return;
      const button = form.querySelector("button.primary");
      button.disabled = true;
      try {
        const path = `pipelines/${part(id())}` + (form.dataset.id ? `/declaration?version=${form.dataset.version}` : "");
        await call("PUT", path, asked());
        window.location.assign(`${root}/pipelines/${part(id())}`);
      } catch (error) { fail(error); button.disabled = false; }
    });
    fill();
    write();
  }

  // --- samples ----------------------------------------------------------------------------------------------------

  function documents(text) {
    text = text.trim();
    if (text.startsWith("[")) return JSON.parse(text);
    return text.split("\n").flatMap((line, place) => {
      if (!line.trim()) return [];
      try { return [JSON.parse(line)]; } catch (error) { throw new Error(`Line ${place + 1} is no JSON: ${error.message.replace(/ \(line .*\)$/, "")}`); }
    });
  }

  function samples(form) {
    const told = form.querySelector("[role=alert]"), place = document.getElementById("steps");
    async function show(asked) {
      told.hidden = true;
      place.replaceChildren(); // what is shown is of what was asked now
      try {
        const found = await call("PUT", `pipelines/${part(form.dataset.pipeline)}/dry-run`, asked());
        place.replaceChildren(...found.map((sample, number) => {
          const steps = sample.steps.map((step) => make("div", { className: "step" }, make("h3", {}, step.step, make("span", { className: `chip ${step.outcome}` }, step.outcome)),
            step.reason ? make("p", { className: "bad" }, step.reason) : make("pre", {}, step.document === null ? "–" : JSON.stringify(step.document, null, 1))));
          const end = sample.outcome === "index" || sample.outcome === "delete" ? `${sample.outcome} ${sample.id}${sample.version === null ? "" : `, version ${sample.version}`}` : sample.outcome;
          const own = sample.place === `sample-0-${number}`;
          if (!own) steps.unshift(make("div", { className: "step" }, make("h3", {}, "as it came"), make("pre", {}, sample.value ?? "–")));
          return make("section", { className: "sample" }, make("h3", {}, own ? `Document ${number + 1}` : sample.place, make("span", { className: `chip ${sample.outcome}` }, end)),
            sample.reason && !sample.steps.length ? make("p", { className: "bad" }, sample.reason) : make("div", { className: "steps" }, ...steps));
        }));
        if (!found.length) place.textContent = "There is no record yet.";
      } catch (error) { told.textContent = error.message; told.hidden = false; }
    }
    form.addEventListener("submit", (event) => { event.preventDefault(); show(() => ({ documents: documents(form.elements.documents.value) })); });
    form.querySelector("#newest")?.addEventListener("click", () => show(() => ({ newest: 5 })));
  }

  // --- errors -----------------------------------------------------------------------------------------------------

  function errors(box) {
    const path = `pipelines/${part(box.dataset.pipeline)}/redrive`, words = box.querySelector("#redrive-words");
    const button = (name) => box.querySelector(`[data-redrive=${name}]`);
    const chosen = () => [...document.querySelectorAll("input.chosen:checked")].map((each) => each.value);
    let timer = 0;

    function tell(status) {
      const busy = status.state === "RUNNING" || status.state === "WAITING";
      button("cancel").hidden = !busy;
      const counts = status.counts, told = counts.looked_at === undefined ? "" : `${counts.written} in the sink, ${counts.failed_again} failed again, ${counts.filtered} filtered, of ${counts.selected} that fit`;
      const at = `${status.done} of ${status.of}`;
      words.textContent = {
        NONE: "", RUNNING: `A redrive of ${status.asked_by} is at ${at}: ${told || "it begins"}.`, WAITING: `A redrive of ${status.asked_by} waits at ${at}, and goes on by itself: ${status.cause}`,
        DONE: `The last redrive is done: ${told}.`, FAILED: `The last redrive failed at ${at}: ${status.cause}`, CANCELLED: `The last redrive was ended at ${at}: ${told || "nothing was done"}.`,
      }[status.state];
      window.clearTimeout(timer);
      if (busy) timer = window.setTimeout(look, 1000);
    }
    async function look() {
      try { tell(await call("GET", path)); } catch (error) { words.textContent = error.message; timer = window.setTimeout(look, 5000); }
    }
    async function begin(selection) {
      try { tell(await call("PUT", path, selection)); } catch (error) { window.millrace.notice(error.message, true); }
    }
    function count() { const number = chosen().length; button("chosen").disabled = number === 0 || !button("chosen").dataset.may; button("chosen").textContent = number ? `Redrive the ${number} chosen` : "Redrive the chosen"; }

    button("all").addEventListener("click", () => begin(JSON.parse(box.dataset.selection)));
    button("chosen").addEventListener("click", () => begin({ ids: chosen() }));
    button("cancel").addEventListener("click", async () => { try { tell(await call("DELETE", path)); } catch (error) { window.millrace.notice(error.message, true); } });
    document.addEventListener("change", (event) => {
      if (event.target.id === "all-errors") document.querySelectorAll("input.chosen").forEach((each) => { each.checked = event.target.checked; });
      if (event.target.matches("#all-errors, input.chosen")) count();
    });
    tell(JSON.parse(box.dataset.status));
  }

  const found = (id, begin) => { const place = document.getElementById(id); if (place) begin(place); };
  found("pipeline", form);
  found("dry-run", samples);
  found("redrive", errors);
})();
