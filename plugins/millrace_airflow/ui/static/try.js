// "Try it" on the page of the API: asks a route with the parameters of its form, by the browser's session, and shows the answer.
(function () {
  "use strict";
  document.addEventListener("submit", async (event) => {
    const form = event.target.closest?.("form[data-route]");
    if (!form) return;
    event.preventDefault();
    const answer = form.parentElement.querySelector("pre");
    const query = new URLSearchParams();
    let path = form.dataset.route;
    for (const input of form.querySelectorAll("input[name]")) {
      const value = input.value.trim();
      if (input.dataset.place === "path") path = path.replace(`{${input.name}}`, encodeURIComponent(value));
      else if (value) query.set(input.name, value);
    }
    const url = path + (query.size ? `?${query}` : "");
    answer.hidden = false;
    answer.textContent = `GET ${url} …`;
    try {
      const found = await fetch(url, { credentials: "same-origin", cache: "no-store", headers: { Accept: "application/json" } });
      let text = await found.text();
      try { text = JSON.stringify(JSON.parse(text), null, 2); } catch (error) { /* text as it is */ }
      answer.textContent = `GET ${url}\n${found.status} ${found.statusText}\n\n${text.length > 200000 ? `${text.slice(0, 200000)}\n…` : text}`;
    } catch (error) { answer.textContent = `GET ${url}\n${error.message}`; }
  });
})();
