// The live view: connected only while somebody looks at it.

import { titleOf } from "./chat.js";
import { byId, make } from "./dom.js";
import { ago, bytes, count, plural, rate, seconds } from "./format.js";
import { drawGaps, drawTimeline, iterationAt } from "./timeline.js";
import { drawTree, runsOf, wordsOf } from "./tree.js";
import { WINDOW_S, Watch, stateOf } from "./watch.js";

const AGAIN_MS = 2000;
const DRAW_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 100;
const SLOWLY_MS = 1000;

let watch = new Watch();
let wanted = false;
let allowed = false;
let connection = null;
let paused_s = null;
let timers = [];

export function show(isShown) {
  wanted = isShown;
  update();
}

// Whether the server would answer.
export function setAllowed(isAllowed) {
  allowed = isAllowed;
  update();
}

document.addEventListener("visibilitychange", update);
byId("pause").addEventListener("click", () => {
  paused_s = paused_s === null ? watch.now() : null;
  byId("pause").textContent = paused_s === null ? "Pause" : "Go on";
  byId("pause").setAttribute("aria-pressed", String(paused_s !== null));
});
byId("timeline").addEventListener("pointermove", (event) => {
  byId("tip").textContent = iterationAt(event.target, watch, shownNow(), event.offsetX);
});
byId("timeline").addEventListener("pointerleave", () => (byId("tip").textContent = ""));
new ResizeObserver(() => watch.bank && drawBank()).observe(byId("tree"));

const shownNow = () => paused_s ?? watch.now();

function update() {
  const looking = wanted && allowed && document.visibilityState === "visible";
  if (looking && !connection) connect();
  if (!looking && connection) {
    connection.abort();
    connection = null;
    timers.forEach(clearInterval);
    timers = [];
  }
}

async function connect() {
  const mine = new AbortController();
  connection = mine;
  timers = [setInterval(draw, DRAW_MS), setInterval(drawSlowly, SLOWLY_MS)];
  while (!mine.signal.aborted) {
    watch = new Watch();
    try {
      await watch.follow(mine.signal, (type) => {
        say("");
        if (type === "bank") drawBank();
        if (type === "requests") drawRequests();
      });
      say("The server has stopped. Trying again.");
    } catch (error) {
      if (error.name === "AbortError") return;
      say(`${error.message} Trying again.`);
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

function say(text) {
  if (byId("live-said").textContent !== text) byId("live-said").textContent = text;
}

// A stream of this page has its conversation's title; of others nothing is told.
const nameOf = (stream) => titleOf(stream.id) || `Request ${stream.id.slice(0, 4)}`;

function draw() {
  if (!watch.engine) return;
  const now = shownNow();
  drawTimeline(byId("timeline"), watch, now, nameOf);
  drawGaps(byId("gaps"), watch, now);
}

function drawSlowly() {
  const { engine } = watch;
  if (!engine) return;
  const { answered, read } = watch.rates();
  const target = watch.iterations.findLast((each) => each.target_s !== null)?.target_s ?? null;
  byId("tile-running").textContent = count(engine.running);
  byId("tile-waiting").textContent = engine.waiting ? `${count(engine.waiting)} waiting` : "none waiting";
  byId("tile-decode").textContent = rate(answered);
  byId("tile-prefill").textContent = rate(read);
  byId("tile-gap").textContent = seconds(watch.worstGap());
  byId("tile-target").textContent =
    target === null ? `last ${WINDOW_S} s` : `last ${WINDOW_S} s, target ${seconds(target)}`;
  drawStreams();
  drawMemory(engine);
  if (watch.requests.length) drawRequests();
}

const row = (heading, ...cells) =>
  make("tr", {}, make("th", { scope: "row" }, heading), ...cells.map((cell) => make("td", {}, cell)));

function drawStreams() {
  const rows = watch.shown.map((stream) => {
    const gaps = stream.tokens.filter((each) => each.gap !== null);
    const late = gaps.filter((each) => each.target !== null && each.gap > each.target).length;
    const worst = gaps.length ? Math.max(...gaps.map((each) => each.gap)) : null;
    const state = stateOf(stream, watch.open);
    return row(
      nameOf(stream),
      state === "reading" ? `reading, ${Math.round((100 * stream.read) / stream.prompt)} %` : state,
      stream.prompt === null ? "–" : count(stream.prompt),
      seconds(gaps.at(-1)?.gap),
      seconds(worst),
      gaps.length ? `${count(late)} of ${count(gaps.length)}` : "–",
    );
  });
  byId("streams").hidden = !rows.length;
  byId("streams").tBodies[0].replaceChildren(...rows);
}

function drawMemory(engine) {
  const { bank_bytes: held, kv_running_bytes: used, kv_limit_bytes: limit } = engine;
  const whole = Math.max(limit ?? held, held, 1);
  const [running, kept] = byId("memory").children;
  running.style.width = `${(100 * used) / whole}%`;
  kept.style.width = `${(100 * (held - used)) / whole}%`;
  byId("memory-sum").textContent =
    limit === null ? `${bytes(held)}, no limit` : `${bytes(held)} of ${bytes(limit)}`;
  const disk = engine.disk ? ` · ${bytes(engine.disk.bytes)} on disk` : "";
  const gone = engine.bank_evictions ? ` · ${plural(engine.bank_evictions, "run")} gave way so far` : "";
  byId("memory-words").textContent =
    `${bytes(used)} in use by ${plural(engine.running, "request")} · ` +
    `${bytes(held - used)} kept for later${gone}${disk}`;
}

function drawBank() {
  const { bank } = watch;
  const { runs } = runsOf(bank.nodes);
  const tokens = runs.reduce((sum, run) => sum + run.end - run.start, 0);
  const size = runs.reduce((sum, run) => sum + run.bytes, 0);
  const more = bank.left_out ? ` · and ${plural(bank.left_out, "run")} more` : "";
  byId("tree-sum").textContent = runs.length
    ? `${plural(tokens, "token")} · ${bytes(size)}${more}`
    : "";
  if (runs.length) drawTree(byId("tree"), bank);
  else byId("tree").replaceChildren(make("p", { class: "note" }, "Nothing is kept yet."));
  byId("tree-table").tBodies[0].replaceChildren(
    ...runs.map((run) =>
      row(
        `${count(run.start)}–${count(run.end)}`,
        run.text === null ? "not shown" : `“${wordsOf(run)}…”`,
        run.above ? `${count(run.above.start)}–${count(run.above.end)}` : "–",
        bytes(run.bytes),
        run.uses ? plural(run.uses, "time") : "never",
      ),
    ),
  );
}

function drawRequests() {
  const now = watch.now();
  byId("requests").replaceChildren(...watch.requests.slice(0, 12).map((each) => requestItem(each, now)));
}

function requestItem(request, now) {
  const { prompt_tokens: prompt, cached_tokens: cached } = request;
  const title = titleOf(request.id) || `Request ${request.id.slice(0, 4)}`;
  const parts = [];
  if (prompt) parts.push(`${count(cached)} cached, ${count(request.new_prefill_tokens)} new`);
  if (request.ttft_s) parts.push(`${seconds(request.ttft_s)} to first token`);
  parts.push(plural(request.completion_tokens, "token"));
  if (request.itl_worst_s) {
    const target = request.itl_target_s ? `, target ${seconds(request.itl_target_s)}` : "";
    parts.push(`worst gap ${seconds(request.itl_worst_s)}${target}`);
  }
  const share = make("i", { class: "cached" });
  share.style.width = prompt ? `${(100 * cached) / prompt}%` : "0";
  return make(
    "li",
    {},
    make(
      "p",
      { class: "request-head" },
      make("b", { dir: "auto" }, title),
      make("span", { class: `outcome ${request.outcome}` }, request.outcome),
      make("span", { class: "when" }, ago(now - request.end_s)),
    ),
    make("span", { class: "split", "aria-hidden": "true", ...(prompt ? {} : { hidden: true }) }, share),
    make("p", { class: "request-facts" }, parts.join(" · ")),
    request.why ? make("p", { class: "why" }, request.why) : null,
  );
}
