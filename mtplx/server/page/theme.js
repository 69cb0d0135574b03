// Light or dark, before anything is painted: a plain script in the head. "auto" follows
// the system.
(() => {
  const KEY = "mtplx.theme";
  const ORDER = ["auto", "light", "dark"];
  const root = document.documentElement;

  function read() {
    try {
      const kept = localStorage.getItem(KEY);
      return ORDER.includes(kept) ? kept : "auto";
    } catch {
      return "auto"; // Storage may be forbidden; the page works without.
    }
  }

  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
      button.setAttribute("aria-label", `Colours: ${theme}. Change.`);
    }
    document.dispatchEvent(new Event("themechange"));
  }

  show(read());
  document.addEventListener("DOMContentLoaded", () => {
    show(read());
    document.getElementById("theme").addEventListener("click", () => {
      const next = ORDER[(ORDER.indexOf(read()) + 1) % ORDER.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // Kept for this view only.
      }
      show(next);
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new Event("themechange")),
  );
})();
