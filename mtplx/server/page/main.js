// Puts the page together: the key, the two views, who is served.

import { getHealth, getJson, hasKey, keepKey } from "./api.js";
import * as chat from "./chat.js";
import { byId } from "./dom.js";
import { count } from "./format.js";
import * as live from "./live.js";

const VIEWS = ["chat", "live"];

function showView(name, focus = false) {
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
    if (focus && each === name) tab.focus();
  }
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  live.show(name === "live");
}

function startTabs() {
  for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => showView(name));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const shown = VIEWS.findIndex((each) => !byId(each).hidden);
    const to = { Home: 0, End: 1 }[event.key] ?? 1 - shown;
    showView(VIEWS[to], true);
  });
  const follow = () => VIEWS.includes(location.hash.slice(1)) && showView(location.hash.slice(1));
  addEventListener("hashchange", follow);
  follow();
}

function askForKey(said) {
  byId("key-form").hidden = false;
  byId("key-open").hidden = true;
  byId("key-said").textContent = said;
  byId("key").focus();
}

async function connect() {
  let health;
  try {
    health = await getHealth();
  } catch (error) {
    byId("served").textContent = error.message;
    return;
  }
  if (!health.model) {
    // Only the status is told to who has no key.
    byId("served").textContent = "";
    askForKey(
      hasKey()
        ? "The server does not know this key. Check it, and try again."
        : "This server asks for an API key. It is kept in this browser only.",
    );
    return;
  }
  const { model } = health;
  byId("served").textContent =
    `${model.name} · ${model.dtype} on the ${model.device.toUpperCase()} · ` +
    `context ${count(model.context_length)}`;
  byId("key-form").hidden = true;
  byId("key-said").textContent = "";
  byId("key-open").hidden = !hasKey();
  const models = await getJson("/v1/models");
  chat.setModels(models.data.map((each) => each.id));
  live.setAllowed(true);
}

function startKey() {
  byId("key-open").addEventListener("click", () => askForKey(""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey(byId("key").value.trim());
    byId("key").value = "";
    connect();
  });
}

chat.start((said) => askForKey(said));
startKey();
startTabs();
connect();
