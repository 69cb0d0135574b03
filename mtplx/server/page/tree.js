// Draws the prefix tree: from left to right in tokens, what is common once, branches
// below each other.

import { makeSvg } from "./dom.js";
import { bytes, count, plural } from "./format.js";

const ROW = 26;
const BAR = 20;
const LEAST_WIDTH = 3;
const AXIS = 20;

// Runs that only follow each other are one line of state: drawn and told as one.
export function runsOf(nodes) {
  const runs = [];
  const runOf = new Map(); // index of a node -> its run
  nodes.forEach((node, index) => {
    const above = runOf.get(node.parent);
    const follows = above && above.children === 1 && above.uses === node.uses;
    if (follows) {
      above.end = node.end;
      above.bytes += node.bytes;
      above.snapshots.push(...node.snapshots);
      above.children = node.children;
      above.pinned ||= node.pinned;
      above.age = Math.min(above.age, node.age);
      runOf.set(index, above);
    } else {
      const run = { ...node, snapshots: [...node.snapshots], above: above ?? null };
      runs.push(run);
      runOf.set(index, run);
    }
  });
  // The first branch goes on in the row of what it follows.
  let rows = 0;
  const goesOn = new Set();
  for (const run of runs) {
    if (run.above && !goesOn.has(run.above)) {
      goesOn.add(run.above);
      run.row = run.above.row;
    } else {
      run.row = rows++;
    }
  }
  return { runs, rows };
}

export function drawTree(place, bank) {
  const { runs, rows } = runsOf(bank.nodes);
  const width = Math.max(place.clientWidth, 200);
  const most = Math.max(...runs.map((run) => run.end), 1);
  const x = (tokens) => (tokens / most) * (width - 2) + 1;
  const height = rows * ROW + AXIS;
  const svg = makeSvg("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `Prefix tree of ${plural(runs.length, "run")}; the table below tells it.`,
  });
  drawAxis(svg, most, x, height, width);
  for (const run of runs) {
    if (run.above && run.row !== run.above.row) svg.append(elbow(run, x));
  }
  for (const run of runs) svg.append(bar(run, x, width));
  place.replaceChildren(svg);
}

function drawAxis(svg, most, x, height, width) {
  const step = niceStep(most / Math.max(width / 120, 2));
  for (let at = 0; at <= most; at += step) {
    svg.append(
      makeSvg("line", { x1: x(at), x2: x(at), y1: 0, y2: height - AXIS + 4, class: "grid" }),
      makeSvg(
        "text",
        {
          x: x(at),
          y: height - 5,
          class: "tick",
          "text-anchor": at === 0 ? "start" : x(at) > width - 30 ? "end" : "middle",
        },
        at === 0 ? "0 tokens" : count(at),
      ),
    );
  }
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return Math.ceil([1, 2, 5, 10].find((factor) => factor * power >= least) * power);
}

function elbow(run, x) {
  const [from, to] = [run.above.row * ROW + BAR, run.row * ROW + BAR / 2];
  return makeSvg("path", { d: `M ${x(run.start) - 4} ${from} V ${to} h 4`, class: "elbow" });
}

function bar(run, x, width) {
  const [x1, x2] = [x(run.start), Math.max(x(run.end) - 1.5, x(run.start) + LEAST_WIDTH)];
  const y = run.row * ROW;
  const heat = run.uses === 0 ? "h0" : run.uses < 3 ? "h1" : run.uses < 10 ? "h2" : "h3";
  const group = makeSvg("g", { class: `run ${heat}${run.pinned ? " pinned" : ""}` });
  group.append(
    makeSvg("title", {}, tell(run)),
    makeSvg("rect", { x: x1, y, width: x2 - x1, height: BAR, rx: 4 }),
  );
  for (const at of run.snapshots.length > 1 ? run.snapshots.slice(0, -1) : []) {
    group.append(makeSvg("line", { x1: x(at), x2: x(at), y1: y + 3, y2: y + BAR - 3, class: "mark" }));
  }
  const label = labelOf(run);
  const room = Math.floor((x2 - x1 - 12) / 6.4);
  if (room >= 4) {
    const shown = label.length > room ? `${label.slice(0, room - 1)}…` : label;
    group.append(makeSvg("text", { x: x1 + 7, y: y + BAR / 2 + 4 }, shown));
  }
  return group;
}

const labelOf = (run) =>
  run.text === null ? plural(run.end - run.start, "token") : wordsOf(run);

// Without the template's marks, which are in every prompt.
export const wordsOf = (run) => run.text.replace(/<\|[^|]*\|>|\s+/g, " ").trim() || "…";

export function tell(run) {
  const parts = [
    `tokens ${count(run.start)} to ${count(run.end)}`,
    bytes(run.bytes),
    run.uses ? `restored ${plural(run.uses, "time")}` : "never restored yet",
  ];
  if (run.snapshots.length) parts.push(plural(run.snapshots.length, "snapshot"));
  if (run.pinned) parts.push("in use");
  if (run.text !== null) parts.unshift(`“${labelOf(run)}…”`);
  return parts.join(" · ");
}
