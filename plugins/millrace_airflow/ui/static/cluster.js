// Buttons that ask the cluster for something, through the API of these pages, which checks who asks.
(function () {
  "use strict";
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button[data-method]");
    if (!button || button.disabled) return;
    button.disabled = true;
    try {
      const answer = await fetch(`${document.body.dataset.root}/api/v1/${button.dataset.path}`, {
        method: button.dataset.method, credentials: "same-origin", cache: "no-store", headers: { Accept: "application/json" },
      });
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error ? found.error.message : `The server answered ${answer.status}.`);
      window.millrace.notice(button.dataset.words);
    } catch (error) { window.millrace.notice(error.message, true); }
    finally { button.disabled = false; }
  });
})();
