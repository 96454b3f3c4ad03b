// Runs before the first paint, so that the page never flashes in the other theme: the chosen one, else the system's.
const system = matchMedia("(prefers-color-scheme: dark)");

function apply() {
  const chosen = localStorage.getItem("raytide.theme");
  const isKnown = chosen === "dark" || chosen === "light";
  document.documentElement.dataset.theme = isKnown ? chosen : system.matches ? "dark" : "light";
}

apply();
system.addEventListener("change", apply);
