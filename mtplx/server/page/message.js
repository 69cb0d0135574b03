// How one message looks.

import { count, plural, rate, seconds } from "./format.js";
import { make } from "./dom.js";
import { render } from "./markdown.js";

// The element of a message, with `update()`.
export function viewOf(message, onRetry) {
  return message.role === "user" ? userView(message) : new AnswerView(message, onRetry);
}

function userView(message) {
  const text = make("div", { class: "text plain", dir: "auto" }, message.content);
  const element = make("li", { class: "user" }, make("h3", { class: "hidden" }, "You"), text);
  return { element, update() {}, retryable() {} };
}

class AnswerView {
  constructor(message, onRetry) {
    this._message = message;
    this._text = make("div", { class: "text" });
    this._thought = make("div", { class: "plain", dir: "auto" });
    this._thinking = make(
      "details",
      { class: "thinking", hidden: true },
      make("summary", {}, "Thinking"),
      this._thought,
    );
    this._bar = make("progress", { max: "1" });
    this._cached = make("i");
    this._told = make("p", { class: "told" });
    this._progress = make(
      "div",
      { class: "progress" },
      make("div", { class: "bar" }, this._bar, this._cached),
      this._told,
    );
    this._numbers = make("div", { class: "numbers" });
    this._problem = make("p", { class: "problem", hidden: true });
    this._retry = make("button", { type: "button", class: "quiet", onclick: onRetry }, "Retry");
    this._foot = make("div", { class: "foot" }, this._numbers, this._retry);
    this.element = make(
      "li",
      { class: "answer" },
      make("h3", { class: "hidden" }, "Answer"),
      this._progress,
      this._thinking,
      this._text,
      this._problem,
      this._foot,
    );
    this._drawnLength = -1;
    this.update();
  }

  // `last`: it is the last message, which can be asked for once more.
  retryable(last) {
    this._retry.hidden = !last || !isOver(this._message);
  }

  update() {
    const { message } = { message: this._message };
    this.element.setAttribute("aria-busy", String(!isOver(message)));
    this._showProgress(message);
    this._thinking.hidden = !message.reasoning;
    if (message.reasoning) this._thought.textContent = message.reasoning;
    if (this._drawnLength !== message.content.length) {
      render(this._text, message.content);
      this._drawnLength = message.content.length;
    }
    this._problem.hidden = !message.error && message.state !== "stopped";
    this._problem.textContent = message.error ?? "Stopped.";
    this._problem.classList.toggle("calm", message.state === "stopped");
    this._foot.hidden = !isOver(message);
    if (isOver(message)) this._numbers.replaceChildren(...numbersView(message));
  }

  _showProgress(message) {
    const { progress } = message;
    this._progress.hidden = !["waiting", "reading"].includes(message.state);
    if (!progress) {
      this._bar.removeAttribute("value");
      this._cached.style.width = "0";
      this._told.textContent = "Waiting for its turn";
      this._bar.setAttribute("aria-label", "Waiting for its turn");
      return;
    }
    const { total, cache, processed, time_ms } = progress;
    this._bar.value = processed / total;
    this._cached.style.width = `${(100 * cache) / total}%`;
    const done = `${count(processed)} of ${plural(total, "token")} read`;
    const kept = cache ? `, ${count(cache)} of them restored` : "";
    const computed = processed - cache;
    const left_s = computed > 0 ? ((total - processed) / computed) * (time_ms / 1000) : 0;
    const left = left_s > 1 ? ` · about ${seconds(Math.ceil(left_s))} left` : "";
    this._told.textContent = `${done}${kept}${left}`;
    this._bar.setAttribute("aria-label", "Prompt read");
  }
}

export const isOver = (message) => ["done", "stopped", "failed"].includes(message.state);

function numbersView({ numbers, finish }) {
  if (!numbers) return [];
  const share = (100 * numbers.cached_tokens) / numbers.prompt_tokens;
  const cached = make("i", { class: "cached" });
  cached.style.width = `${share}%`;
  const split = make("span", { class: "split", "aria-hidden": "true" }, cached);
  const items = [
    fact(`${count(numbers.cached_tokens)} cached`, "prompt tokens restored from memory"),
    fact(`${count(numbers.new_prefill_tokens)} new`, "prompt tokens computed"),
    fact(`${seconds(numbers.ttft_s)} to first token`, "from sending to the first token"),
  ];
  if (numbers.tok_s) {
    items.push(fact(`${rate(numbers.tok_s)} tok/s`, "tokens of the answer a second"));
  }
  items.push(fact(plural(numbers.completion_tokens, "token"), "length of the answer"));
  if (finish === "length") items.push(fact("cut at the limit", "the most tokens allowed"));
  return [split, make("ul", { class: "facts" }, ...items)];
}

function fact(text, title) {
  return make("li", { title }, text);
}
