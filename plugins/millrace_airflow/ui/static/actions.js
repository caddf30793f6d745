// Starts a DAG from a button: a form made of the DAG's own parameters, and a run through Airflow's REST API, which checks both.
(function () {
  "use strict";
  const dialog = document.getElementById("start");
  const form = dialog.querySelector("form");

  function make(name, properties, ...children) {
    const made = document.createElement(name);
    Object.assign(made, properties || {});
    made.append(...children.filter((each) => each !== null && each !== undefined && each !== ""));
    return made;
  }

  async function ask(method, path, value) {
    const answer = await fetch(`${window.millrace.airflow}/api/v2${path}`, {
      method, credentials: "same-origin", cache: "no-store",
      headers: { Accept: "application/json", ...(value === undefined ? {} : { "Content-Type": "application/json" }) },
      body: value === undefined ? undefined : JSON.stringify(value),
    });
    const text = await answer.text();
    let found = null;
    try { found = JSON.parse(text); } catch (error) { /* not JSON: the status says enough */ }
    if (answer.ok) return found;
    const detail = found && found.detail;
    const words = typeof detail === "string" ? detail : Array.isArray(detail) ? detail.map((each) => each.msg).join("; ") : detail ? JSON.stringify(detail) : "";
    const told = { 401: "You are logged out.", 403: "You may not do this.", 404: "Airflow has no such DAG (yet)." }[answer.status];
    throw Object.assign(new Error(words && answer.status !== 404 ? words : told || `Airflow answered ${answer.status}.`), { status: answer.status, problems: (found && found.problems) || [] });
  }

  // Under a name of its own, so that a repeated call begins no second run: Airflow's database may be locked for a moment.
  async function begin(dag, asked) {
    for (let left = 4; ; left -= 1) {
      try { return await ask("POST", `/dags/${encodeURIComponent(dag)}/dagRuns`, asked); }
      catch (problem) {
        if (left < 4 && problem.status === 409) return asked;
        if (!left || problem.status < 500) throw problem;
        await new Promise((resolve) => { window.setTimeout(resolve, 2000); });
      }
    }
  }

  const kinds = (schema) => [].concat(schema.type || []).concat(...(schema.anyOf || []).map((each) => each.type || []));

  // A moment as a picker holds it, in UTC; "" for what it cannot hold.
  function picked(value) {
    const moment = value ? new Date(/[zZ]|[+-]\d\d:?\d\d$/.test(value.slice(10)) ? value : `${value.slice(0, 10)}T${value.slice(11) || "00:00"}Z`) : null;
    return moment === null || Number.isNaN(moment.getTime()) ? "" : moment.toISOString().slice(0, 19);
  }

  // One parameter as a field; read() gives its value, or undefined where it was left empty.
  function field(name, parameter, value) {
    const schema = parameter.schema || {};
    const types = kinds(schema);
    const title = schema.title || name.replaceAll("_", " ");
    const note = parameter.description || schema.description || schema.description_md || "";
    const id = `param-${name}`;
    let input, read, tick = null, unit = "";
    if (types.includes("boolean")) {
      input = make("input", { type: "checkbox", id, checked: Boolean(value) });
      const label = make("label", { className: "check" }, input, make("span", {}, title), make("small", {}, note));
      return { name, label, input, read: () => input.checked, optional: true };
    }
    if (Array.isArray(schema.enum)) {
      input = make("select", { id }, ...schema.enum.map((each) => make("option", { value: JSON.stringify(each), selected: each === value }, each === null ? "none" : String(each))));
      read = () => JSON.parse(input.value);
    } else if (types.includes("array") && (schema.examples || []).length) {
      const chosen = new Set(value || []);
      const all = [...new Set([...schema.examples, ...chosen])];
      input = make("select", { id, multiple: true, size: Math.min(6, all.length) }, ...all.map((each) => make("option", { value: each, selected: chosen.has(each) }, each)));
      read = () => Array.from(input.selectedOptions, (each) => each.value);
    } else if (types.includes("array")) {
      const simple = !Array.isArray(value) || value.every((each) => typeof each === "string");
      input = make("textarea", { id, value: simple ? (value || []).join("\n") : JSON.stringify(value, null, 1), rows: 2 });
      read = () => {
        const text = input.value.trim();
        if (!text) return [];
        return text.startsWith("[") ? JSON.parse(text) : text.split(/\n/).map((each) => each.trim()).filter(Boolean);
      };
    } else if (types.includes("object")) {
      input = make("textarea", { id, value: value ? JSON.stringify(value, null, 1) : "", rows: 3 });
      read = () => (input.value.trim() ? JSON.parse(input.value) : null);
    } else if (types.includes("integer") || types.includes("number")) {
      input = make("input", { id, type: "text", inputMode: "decimal", value: value ?? "" });
      read = () => {
        const text = input.value.trim();
        if (!text) return null;
        if (Number.isNaN(Number(text))) throw new Error(`A number, not “${text}”.`);
        return Number(text);
      };
    } else if (schema.format === "date-time" || schema.format === "tick-or-date-time") {
      input = make("input", { id, type: "datetime-local", step: "1", value: /^\d*$/.test(value ?? "") ? "" : picked(value) });
      unit = " (UTC)";
      if (schema.format === "tick-or-date-time") {
        tick = make("input", { id: `${id}-tick`, type: "text", inputMode: "numeric", placeholder: "or a time tick", value: /^\d+$/.test(value ?? "") ? value : "" });
        tick.setAttribute("aria-label", `${title}: a time tick`);
      }
      read = () => {
        if (tick && tick.value.trim()) return tick.value.trim();
        if (input.value) return `${input.value.length === 16 ? `${input.value}:00` : input.value}Z`;
        if (types.includes("null")) return null;
        if (tick) return "";
        throw new Error("Choose a moment.");
      };
    } else {
      input = make("input", { id, type: "text", value: value ?? "" });
      const pattern = schema.pattern ? new RegExp(schema.pattern) : null;
      read = () => {
        if (input.value === "" && types.includes("null")) return null;
        if (pattern && !pattern.test(input.value)) throw new Error(`“${input.value}” does not fit.`);
        return input.value;
      };
    }
    const suggested = input.tagName === "INPUT" && schema.examples && schema.format !== "date-time" ? make("datalist", { id: `${id}-choices` }, ...schema.examples.map((each) => make("option", { value: String(each) }))) : null;
    if (suggested) input.setAttribute("list", suggested.id);
    const range = [schema.minimum !== undefined ? `from ${schema.minimum}` : "", schema.maximum !== undefined ? `to ${schema.maximum}` : ""].filter(Boolean).join(" ");
    const label = make("label", {}, make("span", {}, title + unit), input, tick, suggested, make("small", {}, [note, range].filter(Boolean).join(" ")));
    return { name, label, input, read, chosen: Array.isArray(schema.examples) && !schema.section, optional: !(types.length && !types.includes("null") && (value === null || value === undefined || value === "")) };
  }

  function frame(title, words, ...rest) {
    form.replaceChildren(make("header", {}, make("h2", { id: "start-title" }, title), make("p", {}, words)), ...rest);
  }

  function footer(...buttons) { return make("footer", {}, make("span", { className: "fill" }), ...buttons); }

  const close = () => make("button", { type: "button", className: "plain", onclick: () => dialog.close() }, "Close");

  // What is wrong with a field stands at it, and is in sight.
  function mark(each, words) {
    each.label.querySelector(".wrong")?.remove();
    if (!words) { each.input.removeAttribute("aria-invalid"); return; }
    const said = make("em", { className: "wrong", id: `wrong-${each.name}` }, words);
    each.input.setAttribute("aria-invalid", "true");
    each.input.setAttribute("aria-describedby", said.id);
    each.label.append(said);
    const folded = each.label.closest("details");
    if (folded) folded.open = true;
  }

  async function open(dag, conf, title) {
    frame(title, "Asking Airflow for its parameters…", make("div", { className: "fields" }), footer(close()));
    dialog.showModal();
    let found;
    try { found = await ask("GET", `/dags/${encodeURIComponent(dag)}/details`); }
    catch (error) { frame(title, error.message, make("div", { className: "fields" }), footer(close())); return; }
    const fields = Object.entries(found.params || {}).map(([name, parameter]) => field(name, parameter, Object.hasOwn(conf, name) ? conf[name] : parameter.value));
    const first = (each) => Object.hasOwn(conf, each.name) || !each.optional || each.chosen || each.name === "dry_run";
    const shown = fields.filter(first), more = fields.filter((each) => !first(each));
    const unpause = make("input", { type: "checkbox", checked: true });
    const error = make("p", { className: "bad", hidden: true });
    error.setAttribute("role", "alert");
    const start = make("button", { type: "submit", className: "primary" }, "Start");
    const parts = make("div", { className: "fields" }, error, ...(fields.length ? [] : [make("p", { className: "sub" }, "It takes no parameters.")]), ...shown.map((each) => each.label));
    if (more.length) {
      const rest = make("details", { open: shown.length === 0 }, make("summary", {}, `${shown.length ? "More parameters" : "Parameters"} (${more.length})`), make("div", {}, ...more.map((each) => each.label)));
      parts.append(rest);
    }
    if (found.is_paused) parts.append(make("label", { className: "check" }, unpause, make("span", {}, "Unpause the DAG"), make("small", {}, "It is paused: a run would wait in the queue.")));
    const page = make("a", { href: `${window.millrace.airflow}/dags/${encodeURIComponent(dag)}`, className: "button" }, "Open the DAG");
    page.dataset.airflowPage = "";
    frame(title, found.description || "", parts, make("footer", {}, page, make("span", { className: "fill" }), close(), start));
    form.onsubmit = async (event) => {
      event.preventDefault();
      error.hidden = true;
      start.disabled = true;
      try {
        const values = {}, problems = [];
        for (const each of fields) {
          mark(each, "");
          try { const value = each.read(); if (value !== undefined) values[each.name] = value; }
          catch (problem) { problems.push({ field: each.name, message: problem.message }); }
        }
        if (problems.length) throw Object.assign(new Error(""), { problems });
        if (found.is_paused && unpause.checked) await ask("PATCH", `/dags/${encodeURIComponent(dag)}?update_mask=is_paused`, { is_paused: false });
        const run = await begin(dag, { dag_run_id: `manual__${new Date().toISOString()}`, logical_date: null, conf: values });
        dialog.close();
        window.millrace.notice(`Started ${dag}.`, false, { words: "See the run", href: `${window.millrace.airflow}/dags/${encodeURIComponent(dag)}/runs/${encodeURIComponent(run.dag_run_id)}` });
      } catch (problem) {
        const others = [];
        for (const { field: name, message } of problem.problems || []) {
          const at = fields.find((each) => each.name === name.split(".")[0]);
          if (at) mark(at, message); else others.push(message);
        }
        const rest = problem.problems?.length ? others.join("; ") : problem.message;
        error.textContent = `${title} was not started. ${rest}`.trim();
        error.hidden = false;
        (form.querySelector("[aria-invalid]") || error).scrollIntoView({ block: "nearest" });
        form.querySelector("[aria-invalid]")?.focus();
      } finally { start.disabled = false; }
    };
    (form.querySelector("input, select, textarea") || start).focus();
  }

  // Airflow marks the run as failed, and the job of a task that waits or runs is stopped.
  async function cancel(button) {
    const { cancel: run, cancelDag: dag } = button.dataset;
    button.disabled = true;
    try {
      await ask("PATCH", `/dags/${encodeURIComponent(dag)}/dagRuns/${encodeURIComponent(run)}?update_mask=state`, { state: "failed" });
      window.millrace.notice(`Cancelled ${dag}.`);
    } catch (problem) {
      button.disabled = false;
      window.millrace.notice(problem.message, true);
    }
  }

  document.addEventListener("click", (event) => {
    const stop = event.target.closest?.("button[data-cancel]");
    if (stop && !stop.disabled) cancel(stop);
    const button = event.target.closest?.("button[data-dag]");
    if (button && !button.disabled) open(button.dataset.dag, JSON.parse(button.dataset.conf || "{}"), button.dataset.title || button.dataset.dag);
  });
})();
