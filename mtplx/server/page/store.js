// Conversations, kept in this browser: each under a key of its own, so that two windows
// do not write over each other's.

const PREFIX = "mtplx.conversation.";
const MOST = 100;

const conversations = new Map();
let problem = null;

export const storageProblem = () => problem;

export function load() {
  conversations.clear();
  try {
    for (const name of Object.keys(localStorage)) {
      if (name.startsWith(PREFIX)) read(localStorage.getItem(name));
    }
  } catch {
    problem = "This browser keeps nothing for this page: conversations end with it.";
  }
}

function read(text) {
  try {
    const found = JSON.parse(text);
    if (typeof found.id === "string" && Array.isArray(found.messages) && found.settings) {
      conversations.set(found.id, found);
    }
  } catch {
    // Written by something else; left alone.
  }
}

// The latest first.
export const list = () =>
  [...conversations.values()].sort((a, b) => b.updated - a.updated);

export const get = (id) => conversations.get(id);

export function create() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
  // Settings: instructions, temperature, max_tokens; what is absent is the server's choice.
  const made = { id, title: "", settings: {}, messages: [], updated: Date.now() };
  conversations.set(id, made);
  return made;
}

export function save(conversation) {
  if (conversations.get(conversation.id) !== conversation) return; // It was deleted.
  conversation.updated = Date.now();
  for (const old of list().slice(MOST)) remove(old.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      problem = null;
      return;
    } catch {
      // Full: the oldest go.
      const oldest = list().at(-1);
      if (!oldest || oldest === conversation) {
        problem = "This browser has no room left: this conversation is not kept.";
        return;
      }
      remove(oldest.id);
    }
  }
}

export function remove(id) {
  conversations.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // It was never kept.
  }
}

// Another window changed something.
export function follow(onChange) {
  addEventListener("storage", (event) => {
    if (!event.key?.startsWith(PREFIX)) return;
    if (event.newValue === null) conversations.delete(event.key.slice(PREFIX.length));
    else read(event.newValue);
    onChange(event.key.slice(PREFIX.length));
  });
}
