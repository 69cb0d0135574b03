// Draws the last half minute: what each iteration was made of, what each stream got of
// it, and the gaps between its tokens.

import { count, seconds } from "./format.js";
import { WINDOW_S, stateOf } from "./watch.js";

const ENGINE_HEIGHT = 40;
const LANE_HEIGHT = 42;
const MOST_LANES = 8;
const GAPS_HEIGHT = 130;
const AXIS_HEIGHT = 20;
const PAD = 4;

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let colours = null;
document.addEventListener("themechange", () => (colours = null));

function palette() {
  colours ??= Object.fromEntries(
    ["ink", "muted", "card", "line", "track", "decode", "new", "on-new", "cached", "bad"].map((name) => [
      name,
      token(`--${name}`),
    ]),
  );
  return colours;
}

// A canvas as sharp as the screen, and as wide as its place.
function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `11.5px ${token("--sans")}`;
  pen.textBaseline = "middle";
  return { pen, width };
}

const placeOf = (now, width) => (at) => width - ((now - at) / WINDOW_S) * width;

function box(pen, x1, x2, y, height, colour) {
  pen.fillStyle = colour;
  pen.fillRect(x1, y, Math.max(x2 - x1, 1), height);
}

function text(pen, words, x, y, colour, most) {
  if (most !== undefined && pen.measureText(words).width > most) {
    while (words.length > 1 && pen.measureText(`${words}…`).width > most) words = words.slice(0, -1);
    words += "…";
  }
  pen.fillStyle = colour;
  pen.fillText(words, x, y);
}

export function drawTimeline(canvas, watch, now, nameOf) {
  const streams = watch.shown.filter((each) => each.last_s > now - WINDOW_S).slice(-MOST_LANES);
  const lanes = Math.max(streams.length, 1);
  const height = ENGINE_HEIGHT + lanes * LANE_HEIGHT + AXIS_HEIGHT;
  const { pen, width } = prepare(canvas, height);
  const colour = palette();
  const place = placeOf(now, width);
  drawAxis(pen, width, height, colour);
  drawIterations(pen, watch.iterations, place, colour);
  if (!streams.length) {
    text(pen, "Nothing in the last 30 seconds.", 0, ENGINE_HEIGHT + 20, colour.muted);
  }
  streams.forEach((stream, index) => {
    const top = ENGINE_HEIGHT + index * LANE_HEIGHT;
    drawLane(pen, stream, top, place, width, colour);
    const told = `${nameOf(stream)} · ${words(stream, watch.open)}`;
    const wide = Math.min(pen.measureText(told).width + 6, width);
    box(pen, 0, wide, top, 17, colour.card);
    text(pen, told, 0, top + 9, colour.ink, width);
  });
}

function words(stream, open) {
  const state = stateOf(stream, open);
  const prompt = stream.prompt === null ? "" : `${count(stream.prompt)} tokens`;
  if (state === "reading" && prompt) return `reading ${count(stream.read)} of ${prompt}`;
  if (state === "waiting" && prompt) return `waiting with ${prompt}`;
  return prompt ? `${state} · prompt of ${prompt}` : state;
}

function drawAxis(pen, width, height, colour) {
  pen.strokeStyle = colour.line;
  pen.lineWidth = 1;
  for (let ago = 0; ago <= WINDOW_S; ago += 5) {
    const x = Math.round(width - (ago / WINDOW_S) * width) + (ago ? 0.5 : -0.5);
    pen.beginPath();
    pen.moveTo(x, 0);
    pen.lineTo(x, height - AXIS_HEIGHT);
    pen.stroke();
    const label = ago ? `−${ago} s` : "now";
    const half = pen.measureText(label).width / 2;
    const at = Math.min(Math.max(x - half, 0), width - 2 * half);
    if (ago % 10 === 0 || width > 600) text(pen, label, at, height - 8, colour.muted);
  }
}

function drawIterations(pen, iterations, place, colour) {
  const [top, height] = [6, ENGINE_HEIGHT - 16];
  for (const { begin_s, took_s, decode_s, spans } of iterations) {
    if (place(begin_s + took_s) < 0) continue;
    let at = begin_s + (decode_s ?? 0);
    box(pen, place(begin_s), place(begin_s + took_s), top, height, colour.track);
    if (decode_s !== null) box(pen, place(begin_s), place(at) - 0.5, top, height, colour.decode);
    const shared = spans.find((span) => span.shared && span.seconds !== null);
    if (shared) box(pen, place(begin_s), place(at) - 0.5, top + height / 2, height / 2, colour.new);
    for (const span of spans) {
      if (!span.seconds) continue;
      box(pen, place(at), place(at + span.seconds) - 0.5, top, height, colour.new);
      at += span.seconds;
    }
  }
}

function drawLane(pen, stream, top, place, width, colour) {
  const [y, height] = [top + 19, 14];
  const from = Math.max(place(Math.min(stream.first_s, stream.last_s)), 0);
  box(pen, from, place(stream.last_s), y + height - 1, 1, colour.line);
  for (const span of stream.spans) {
    const [x1, x2] = [place(span.begin), place(span.end)];
    if (x2 < 0) continue;
    box(pen, x1, x2 - 0.5, y, height, colour.new);
    const told = count(span.to - span.from);
    if (x2 - Math.max(x1, 0) > pen.measureText(told).width + 8) {
      text(pen, told, Math.max(x1, 0) + 4, y + height / 2 + 1, colour["on-new"]);
    }
  }
  const first = stream.spans[0];
  if (stream.cached && first && first.from === stream.cached) {
    const x = place(first.begin);
    box(pen, x - 5, x - 1, y, height, colour.cached);
  }
  for (const { end, gap, target } of stream.tokens) {
    const x = place(end);
    if (x < 0) continue;
    const late = gap !== null && target !== null && gap > target;
    box(pen, x - 1, x + 1, y, height, late ? colour.bad : colour.decode);
  }
}

export function drawGaps(canvas, watch, now) {
  const { pen, width } = prepare(canvas, GAPS_HEIGHT);
  const colour = palette();
  const place = placeOf(now, width);
  const bottom = GAPS_HEIGHT - PAD;
  const points = watch.shown.flatMap((stream) => stream.tokens.filter((each) => each.gap !== null));
  const targets = watch.iterations.filter((each) => each.target_s !== null);
  const most =
    Math.max(0.001, ...points.map((each) => each.gap), ...targets.map((each) => each.target_s)) * 1.1;
  const level = (s) => bottom - (s / most) * (bottom - 14);
  pen.strokeStyle = colour.line;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(level((share * most) / 1.1)) + 0.5;
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(width, y);
    pen.stroke();
    if (share && points.length) text(pen, seconds((share * most) / 1.1), 0, y - 8, colour.muted);
  }
  for (const { end, gap, target: aimed } of points) {
    const x = place(end);
    if (x < 0) continue;
    pen.fillStyle = aimed !== null && gap > aimed ? colour.bad : colour.decode;
    pen.beginPath();
    pen.arc(x, level(gap), 2, 0, 7);
    pen.fill();
  }
  if (targets.length) drawTargets(pen, targets, place, level, width, colour);
  if (!points.length) text(pen, "No gaps yet.", 0, 20, colour.muted);
}

// The target follows what a step costs, so it is drawn as it was at each moment.
function drawTargets(pen, targets, place, level, width, colour) {
  pen.strokeStyle = colour.bad;
  pen.lineWidth = 1;
  pen.setLineDash([5, 4]);
  pen.beginPath();
  let before = null;
  for (const { begin_s, took_s, target_s } of targets) {
    const follows = before !== null && begin_s - before < 1;
    if (follows) pen.lineTo(place(begin_s), level(target_s));
    else pen.moveTo(place(begin_s), level(target_s));
    pen.lineTo(place(begin_s + took_s), level(target_s));
    before = begin_s + took_s;
  }
  pen.stroke();
  pen.setLineDash([]);
  const { target_s } = targets.at(-1);
  const told = `target ${seconds(target_s)}`;
  const at = place(before) - pen.measureText(told).width;
  const y = level(target_s) - 9;
  box(pen, Math.max(at, 0) - 3, Math.max(place(before), 60), y - 7, 14, colour.card);
  text(pen, told, Math.max(at, 0), y, colour.bad);
}

// What is under the pointer, in words.
export function iterationAt(canvas, watch, now, x) {
  const at = now - ((canvas.clientWidth - x) / canvas.clientWidth) * WINDOW_S;
  const found = watch.iterations.find((it) => it.begin_s <= at && at <= it.begin_s + it.took_s);
  if (!found) return "";
  const spans = found.spans.map((span) => `${count(span.start)}–${count(span.end)}`);
  const parts = [`Iteration ${count(found.number)}: ${seconds(found.took_s)}`];
  if (found.decoding.length) parts.push(`${found.decoding.length} streams got a token`);
  if (spans.length) parts.push(`read ${spans.join(", ")}`);
  return `${parts.join(" · ")} · expected ${seconds(found.predicted_s)}`;
}
