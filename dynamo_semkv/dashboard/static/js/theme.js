// Light, dark, or as the system: kept for the next visit.

import { byId } from "./dom.js";

const KEY = "semkv-theme";
const ORDER = ["system", "light", "dark"];

export function startTheme(changed) {
  const button = byId("theme");
  let current = remembered();
  const apply = () => {
    if (current === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = current;
    button.textContent = `Theme: ${current}`;
    changed();
  };
  button.onclick = () => {
    current = ORDER[(ORDER.indexOf(current) + 1) % ORDER.length];
    remember(current);
    apply();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current === "system" && changed());
  apply();
}

// A browser that keeps nothing for this page throws: then the choice lasts as long as the page.
function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return ORDER.includes(kept) ? kept : "system";
  } catch {
    return "system";
  }
}

function remember(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // see above
  }
}
