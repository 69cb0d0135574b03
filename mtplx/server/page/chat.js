// The chat: conversations beside, messages, what is sent. Several answers may come at a
// time, one in each conversation.

import { Answer } from "./answer.js";
import { byId, make } from "./dom.js";
import { plural } from "./format.js";
import { isOver, viewOf } from "./message.js";
import * as store from "./store.js";

const LAST = "mtplx.last";
const running = new Map(); // conversation id -> its Answer
const owners = new Map(); // request id -> conversation id

let models = [];
let current = null;
let views = [];
let onRefused = () => {};

// The title of the conversation that a request is for, if it is one of this page.
export function titleOf(requestId) {
  const conversation = store.get(owners.get(requestId));
  return conversation ? conversation.title : null;
}

export function setModels(names) {
  models = names;
  byId("model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  byId("model-choice").hidden = names.length < 2;
}

// `refused` is called when the server does not know the key.
export function start(refused) {
  onRefused = refused;
  store.load();
  store.follow((id) => {
    if (id === current?.id && !running.has(id)) open(store.get(id) ?? newest());
    showShelf();
  });
  byId("new").addEventListener("click", () => {
    open(blank());
    closeShelf();
    byId("message").focus();
  });
  byId("shelf-open").addEventListener("click", () => {
    const shown = byId("shelf").classList.toggle("open");
    byId("shelf-open").setAttribute("aria-expanded", String(shown));
    if (shown) byId("new").focus();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !byId("shelf").classList.contains("open")) return;
    closeShelf();
    byId("shelf-open").focus();
  });
  startComposer();
  byId("settings").addEventListener("change", () => {
    readSettings();
    if (current.messages.length) store.save(current);
  });
  // What an answer has so far is not lost with the page.
  addEventListener("pagehide", () => {
    for (const id of running.keys()) store.save(store.get(id));
  });
  let last = null;
  try {
    last = store.get(localStorage.getItem(LAST));
  } catch {
    // Nothing is kept.
  }
  open(last ?? newest());
  showShelf();
}

function startComposer() {
  const box = byId("message");
  const fit = () => {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  };
  box.addEventListener("input", fit);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = box.value.trim();
    if (!text || running.has(current.id)) return;
    box.value = "";
    fit();
    readSettings();
    current.messages.push({ role: "user", content: text });
    current.title ||= titleFrom(text);
    ask(current);
  });
  byId("stop").addEventListener("click", () => {
    running.get(current.id)?.stop();
    box.focus();
  });
}

function titleFrom(text) {
  const line = text.split("\n", 1)[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

const newest = () => store.list()[0] ?? blank();

// A conversation without messages is not kept, and there is only one.
const blank = () => store.list().find((each) => !each.messages.length) ?? store.create();

function open(conversation) {
  current = conversation;
  try {
    localStorage.setItem(LAST, conversation.id);
  } catch {
    // Nothing is kept.
  }
  byId("title").textContent = conversation.title || "New conversation";
  showSettings(conversation.settings);
  views = conversation.messages.map(makeView);
  // An answer that nobody waits for any more: the page was closed.
  const last = conversation.messages.at(-1);
  if (last && !isOver(last) && last.role === "assistant" && !running.has(conversation.id)) {
    last.state = "stopped";
    views.at(-1).update();
  }
  byId("messages").replaceChildren(...views.map((view) => view.element));
  showState();
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
}

function showSettings({ instructions, temperature, max_tokens }) {
  byId("instructions").value = instructions ?? "";
  byId("temperature").value = temperature ?? "";
  byId("max-tokens").value = max_tokens ?? "";
  byId("settings").open = false;
}

function readSettings() {
  const number = (id) => (byId(id).checkValidity() && byId(id).value ? Number(byId(id).value) : undefined);
  current.settings = {
    instructions: byId("instructions").value.trim() || undefined,
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
  };
}

function makeView(message) {
  return viewOf(message, () => {
    current.messages.splice(current.messages.indexOf(message));
    ask(current);
  });
}

function ask(conversation) {
  const { id } = conversation;
  const model = models.length > 1 ? byId("model").value : models[0];
  const answer = new Answer(conversation, model, () => changed(conversation));
  conversation.messages.push(answer.message);
  running.set(id, answer);
  store.save(conversation);
  open(conversation);
  showShelf();
  say("Sent.");
  answer.run().then(() => {
    running.delete(id);
    store.save(conversation);
    showShelf();
    if (conversation === current) showState();
    const { state, numbers, error, status } = answer.message;
    if (state === "done") say(`Answer complete, ${plural(numbers.completion_tokens, "token")}.`);
    else say(error ?? "Stopped.");
    if (status === 401) onRefused(error);
  });
}

let due = null;
let cost_ms = 0;

// Draw what has changed, not more often than the page can bear.
function changed(conversation) {
  const { message } = running.get(conversation.id) ?? {};
  if (message?.id) owners.set(message.id, conversation.id);
  if (conversation !== current || due !== null) return;
  due = setTimeout(() => {
    due = null;
    const box = byId("scroll");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    const begin = performance.now();
    views.at(-1)?.update();
    cost_ms = performance.now() - begin;
    if (atEnd) box.scrollTop = box.scrollHeight;
  }, Math.max(40, 4 * cost_ms));
}

function showState() {
  const isRunning = running.has(current.id);
  byId("empty").hidden = current.messages.length > 0;
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  views.at(-1)?.update();
  views.forEach((view, index) => view.retryable(index === views.length - 1));
  byId("kept").textContent = store.storageProblem() ?? "Kept in this browser only.";
}

function showShelf() {
  const kept = store.list().filter((each) => each.messages.length);
  byId("conversations").replaceChildren(...kept.map(shelfItem));
}

function shelfItem(conversation) {
  const isRunning = running.has(conversation.id);
  const button = make(
    "button",
    {
      type: "button",
      class: "open",
      "aria-current": conversation === current ? "true" : null,
      onclick: () => {
        open(conversation);
        showShelf();
        closeShelf();
      },
    },
    make("span", { class: "name", dir: "auto" }, conversation.title),
    isRunning ? make("span", { class: "dot" }, make("span", { class: "hidden" }, "answering")) : null,
  );
  const remove = make(
    "button",
    {
      type: "button",
      class: "remove",
      "aria-label": `Delete ${conversation.title}`,
      title: "Delete",
      onclick: () => removeConversation(conversation),
    },
    "×",
  );
  return make("li", {}, button, remove);
}

function removeConversation(conversation) {
  if (!confirm(`Delete “${conversation.title}”?`)) return;
  running.get(conversation.id)?.stop();
  store.remove(conversation.id);
  if (conversation === current) open(newest());
  showShelf();
  byId("new").focus();
}

function closeShelf() {
  byId("shelf").classList.remove("open");
  byId("shelf-open").setAttribute("aria-expanded", "false");
}

// For who does not see the screen: what begins and what ends, not every word.
function say(text) {
  byId("said").textContent = text;
}
