// Airflow keeps its theme in localStorage under "theme" (light, dark, system); both documents have one origin.
(function () {
  "use strict";
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  function apply() {
    let chosen = null;
    try { chosen = window.localStorage.getItem("theme"); } catch (error) { /* storage may be forbidden */ }
    const dark = chosen === "dark" || (chosen !== "light" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    document.dispatchEvent(new CustomEvent("millrace:theme"));
  }
  apply();
  system.addEventListener("change", apply);
  window.addEventListener("storage", (event) => { if (event.key === "theme") apply(); });
})();
