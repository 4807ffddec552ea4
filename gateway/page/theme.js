/** Light, dark, or as the system says; and the API key. Both pages share them, and they stay in this browser. */

const THEME = "streamkv.theme";
const KEY = "streamkv.api_key";
const CHOICES = ["system", "light", "dark"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

/** localStorage, or nothing where the browser forbids it. */
export function read(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text. Returns whether that was possible: storage can be full or forbidden. */
export function write(name, text) {
  try {
    if (text === null) localStorage.removeItem(name);
    else localStorage.setItem(name, text);
    return true;
  } catch {
    return false;
  }
}

let choice = CHOICES.includes(read(THEME)) ? read(THEME) : "system";

function apply() {
  const isDark = choice === "dark" || (choice === "system" && systemIsDark.matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  dispatchEvent(new Event("themechange"));
}

systemIsDark.addEventListener("change", apply);
addEventListener("storage", ({ key, newValue }) => {
  if (key !== THEME) return;
  choice = CHOICES.includes(newValue) ? newValue : "system";
  apply();
});
apply();

/** Make a button go round the three choices; `label` shows which one holds. */
export function bindThemeButton(button, label) {
  const show = () => {
    label.textContent = `Theme: ${choice}`;
  };
  button.addEventListener("click", () => {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    write(THEME, choice);
    apply();
  });
  addEventListener("themechange", show);
  show();
}

export const apiKey = () => read(KEY) ?? "";
export const setApiKey = (key) => write(KEY, key || null);
