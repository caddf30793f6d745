// Buttons that ask for something, through the API of these pages, which checks who asks: PUT or DELETE, where need be behind a question.
(function () {
  "use strict";

  // The API's answer, or an Error with its words, and with what is wrong by field (`problems`).
  async function call(method, path, body) {
    const answer = await fetch(`${document.body.dataset.root}/api/v1/${path}`, {
      method, credentials: "same-origin", cache: "no-store",
      headers: { Accept: "application/json", ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    const text = await answer.text();
    let found = null;
    try { found = text ? JSON.parse(text) : null; } catch (error) { /* not JSON: the status says enough */ }
    if (answer.ok) return found;
    const told = found && found.error;
    const words = { 401: "You are logged out." }[answer.status] || (told ? told.message : `The server answered ${answer.status}.`);
    throw Object.assign(new Error(words), { code: told ? told.code : "", problems: (told && told.problems) || [] });
  }
  window.millrace.call = call;

  // Ask in the page's own dialog: the frame that Airflow shows these pages in allows no other.
  function sure(button) {
    const dialog = document.getElementById("start"), form = dialog.querySelector("form");
    const make = (name, properties, ...children) => { const made = Object.assign(document.createElement(name), properties); made.append(...children); return made; };
    return new Promise((answer) => {
      let yes = false;
      const go = make("button", { type: "submit", className: "primary" }, button.textContent.trim().replace(/…$/, ""));
      form.replaceChildren(
        make("header", {}, make("h2", { id: "start-title" }, button.textContent.trim().replace(/…$/, "")), make("p", {}, button.dataset.confirm)),
        make("div", { className: "fields" }),
        make("footer", {}, make("span", { className: "fill" }), make("button", { type: "button", className: "plain", onclick: () => dialog.close() }, "Cancel"), go),
      );
      form.onsubmit = (event) => { event.preventDefault(); yes = true; dialog.close(); };
      dialog.addEventListener("close", () => answer(yes), { once: true });
      dialog.showModal();
      go.focus();
    });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button[data-method]");
    if (!button || button.disabled) return;
    if (button.dataset.confirm && !(await sure(button))) return;
    button.disabled = true;
    try {
      const found = await call(button.dataset.method, button.dataset.path, button.dataset.body ? JSON.parse(button.dataset.body) : undefined);
      if (button.dataset.then) window.location.assign(button.dataset.then);
      else window.millrace.notice(button.dataset.words.replace(/\{(\w+)\}/g, (_, name) => found?.[name] ?? ""));
    } catch (error) { window.millrace.notice(error.message, true); }
    finally { button.disabled = false; }
  });
})();
