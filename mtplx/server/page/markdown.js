// An answer's markdown as elements, and nothing else of it: what the model wrote is
// strange text. Its HTML is shown as it stands, pictures are links, since they would be
// asked of other hosts, and all but a list of harmless elements is dropped besides.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";
import { make } from "./dom.js";

const purify = globalThis.DOMPurify;

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a b blockquote br code del details em h1 h2 h3 h4 h5 h6 hr i kbd li ol p".split(" "),
    ..."pre s strong sub summary sup table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

const escape = (text) =>
  text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escape(text)}</p>` : escape(text)),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  },
});

// Longer answers are shown as they are: reading them as markdown would hold up the page.
const MOST_CHARACTERS = 200_000;

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.hasAttribute?.("class") && !/^language-[\w+#-]+$/.test(node.className)) {
    node.removeAttribute("class");
  }
});

// Show `text` in `element`. What has not changed stays as it is, so that a selection
// survives the next piece of an answer.
export function render(element, text) {
  const fresh = [...fragmentOf(text).childNodes];
  const old = [...element.childNodes];
  let same = 0;
  while (same < fresh.length && old[same]?.isEqualNode(fresh[same])) same += 1;
  for (const node of old.slice(same)) node.remove();
  for (const node of fresh.slice(same)) element.append(node);
}

function fragmentOf(text) {
  let fragment;
  try {
    if (text.length > MOST_CHARACTERS) throw new RangeError("too long");
    fragment = purify.sanitize(marked.parse(text), ALLOWED);
  } catch {
    // Too long, or nested deeper than the reader's stack.
    fragment = document.createDocumentFragment();
    fragment.append(make("p", { class: "plain" }, text));
  }
  for (const child of fragment.children) child.dir = "auto";
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", { class: "wide", tabindex: "0" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const block of fragment.querySelectorAll("pre")) {
    block.dir = "ltr";
    block.tabIndex = 0;
    const box = make("div", { class: "code" });
    block.replaceWith(box);
    box.append(block, make("button", { type: "button", class: "copy" }, "Copy"));
  }
  return fragment;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.(".code > .copy");
  if (!button) return;
  const code = button.parentElement.querySelector("pre").innerText;
  try {
    await navigator.clipboard.writeText(code);
    button.textContent = "Copied";
  } catch {
    // No clipboard on a page that is not on this machine; it can still be selected.
    getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
});
