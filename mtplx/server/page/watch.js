// What the server does, as the live view knows it: the last half minute of iterations,
// each stream's way through it, and the latest of everything else.

import { streamEvents } from "./api.js";

export const WINDOW_S = 30;

export class Watch {
  constructor() {
    this.engine = null;
    this.open = [];
    this.bank = null;
    this.requests = [];
    this.iterations = [];
    this.streams = new Map(); // request id -> see _stream
    this.missed = 0;
    this._ahead_s = null;
  }

  // Now, on the server's clock.
  now() {
    return this._ahead_s === null ? 0 : performance.now() / 1000 + this._ahead_s;
  }

  // Follow until `signal` says otherwise; `onEvent` gets the type of each event.
  async follow(signal, onEvent) {
    for await (const event of streamEvents("/v1/live", { signal })) {
      // The event that took least time tells best how far the clocks are apart.
      const ahead_s = event.now_s - performance.now() / 1000;
      this._ahead_s = Math.max(this._ahead_s ?? ahead_s, ahead_s);
      if (event.type === "state") {
        this.engine = event.engine;
        this.open = event.open;
        for (const request of event.open) this._stream(request.id).prompt = request.prompt_tokens;
      } else if (event.type === "bank") {
        this.bank = event.bank;
      } else if (event.type === "requests") {
        this._end(event.requests);
      } else if (event.type === "iterations") {
        this.missed += event.missed;
        for (const iteration of event.iterations) this._add(iteration);
      }
      this._forget();
      onEvent(event.type);
    }
  }

  _stream(id) {
    if (!this.streams.has(id)) {
      this.streams.set(id, {
        id,
        prompt: null, // tokens
        read: 0,
        cached: null,
        first_s: Infinity,
        last_s: this.now(),
        spans: [], // {begin, end, from, to} in seconds and tokens
        tokens: [], // {begin, end, gap, target} in seconds
        outcome: null,
      });
    }
    return this.streams.get(id);
  }

  _add(iteration) {
    this.iterations.push(iteration);
    const { begin_s, decode_s, decoding, gaps_s, spans, target_s } = iteration;
    let at = begin_s + (decode_s ?? 0);
    decoding.forEach((id, index) => {
      const stream = this._stream(id);
      stream.tokens.push({ begin: begin_s, end: at, gap: gaps_s[index], target: target_s });
      this._seen(stream, begin_s, at);
    });
    for (const span of spans) {
      if (span.seconds === null) continue;
      const stream = this._stream(span.request_id);
      // One that shared the streams' forward took part of that time.
      const begin = span.shared ? begin_s : at;
      if (!span.shared) at += span.seconds;
      if (stream.spans.length === 0 && stream.read === 0) stream.cached = span.start;
      stream.spans.push({ begin, end: at, from: span.start, to: span.end });
      stream.read = span.end;
      if (span.is_tail) stream.prompt = span.end;
      this._seen(stream, begin, at);
    }
  }

  _seen(stream, begin, end) {
    stream.first_s = Math.min(stream.first_s, begin);
    stream.last_s = Math.max(stream.last_s, end);
  }

  _end(requests) {
    for (const request of requests) {
      const stream = this.streams.get(request.id);
      if (stream) stream.outcome = request.outcome;
    }
    this.requests = [...requests.reverse(), ...this.requests].slice(0, 50);
  }

  _forget() {
    const from = this.now() - WINDOW_S - 2;
    const old = (each) => each.begin_s + each.took_s < from;
    let gone = 0;
    while (gone < this.iterations.length && old(this.iterations[gone])) gone += 1;
    this.iterations.splice(0, gone);
    for (const stream of this.streams.values()) {
      stream.spans = stream.spans.filter((span) => span.end >= from);
      stream.tokens = stream.tokens.filter((token) => token.end >= from);
      const isOpen = this.open.some((each) => each.id === stream.id);
      if (stream.last_s < from && !isOpen) this.streams.delete(stream.id);
    }
  }

  // In the order they came.
  get shown() {
    const all = [...this.streams.values()];
    return all.sort((a, b) => Math.min(a.first_s, a.last_s) - Math.min(b.first_s, b.last_s));
  }

  // Tokens a second over the last few seconds: answered, and read.
  rates(over_s = 5) {
    const from = this.now() - over_s;
    let answered = 0;
    let read = 0;
    for (const { begin_s, took_s, decoding, spans } of this.iterations) {
      if (begin_s + took_s < from) continue;
      answered += decoding.length;
      for (const span of spans) if (span.seconds !== null) read += span.end - span.start;
    }
    return { answered: answered / over_s, read: read / over_s };
  }

  worstGap() {
    let worst = null;
    for (const { tokens } of this.streams.values()) {
      for (const { gap } of tokens) if (gap !== null && gap > (worst ?? 0)) worst = gap;
    }
    return worst;
  }
}

export function stateOf(stream, open) {
  if (stream.outcome) return stream.outcome === "stop" ? "done" : stream.outcome;
  if (!open.some((each) => each.id === stream.id)) return "done";
  if (stream.tokens.length || (stream.read && stream.read === stream.prompt)) return "answering";
  return stream.read > 0 ? "reading" : "waiting";
}
