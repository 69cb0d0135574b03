// One answer as it comes: the request, its progress, its text, its numbers.

import { streamEvents } from "./api.js";

export class Answer {
  // `onChange` is called after everything that changes the message.
  constructor(conversation, model, onChange) {
    this.message = {
      role: "assistant",
      content: "",
      reasoning: "",
      state: "waiting", // then reading, answering; at last done, stopped or failed
      progress: null,
      numbers: null,
    };
    this._abort = new AbortController();
    this._onChange = onChange;
    this._body = {
      model,
      temperature: conversation.settings.temperature,
      max_tokens: conversation.settings.max_tokens,
      messages: messagesOf(conversation),
      stream: true,
      stream_options: { include_usage: true },
      return_progress: true,
    };
  }

  stop() {
    this._abort.abort();
  }

  async run() {
    const { message } = this;
    const begin = performance.now();
    let first = null;
    let last = null;
    try {
      const events = streamEvents("/v1/chat/completions", {
        body: this._body,
        signal: this._abort.signal,
      });
      for await (const chunk of events) {
        message.id ??= chunk.id.replace(/^chatcmpl-/, "");
        if (chunk.prompt_progress) {
          message.state = "reading";
          message.progress = chunk.prompt_progress;
        }
        const choice = chunk.choices[0];
        const said = choice?.delta.content ?? "";
        const thought = choice?.delta.reasoning_content ?? "";
        if (said || thought) {
          message.content += said;
          message.reasoning += thought;
          message.state = "answering";
          last = performance.now();
          first ??= last;
        }
        if (choice?.finish_reason) message.finish = choice.finish_reason;
        if (chunk.mtplx) message.numbers = numbersOf(chunk, first, last);
        this._onChange();
      }
      message.state = "done";
    } catch (error) {
      if (error.name === "AbortError") {
        message.state = "stopped";
      } else {
        message.state = "failed";
        message.error = error.message;
        message.status = error.status;
      }
    }
    message.total_s = (performance.now() - begin) / 1000;
    message.progress = null;
    this._onChange();
  }
}

function numbersOf(chunk, first, last) {
  const answered = chunk.usage?.completion_tokens ?? 0;
  const took_s = first === null ? 0 : (last - first) / 1000;
  return {
    ...chunk.mtplx,
    completion_tokens: answered,
    // The first token came with the prompt.
    tok_s: answered > 1 && took_s > 0 ? (answered - 1) / took_s : null,
  };
}

function messagesOf({ settings, messages }) {
  const { instructions } = settings;
  const told = instructions ? [{ role: "system", content: instructions }] : [];
  for (const { role, content, reasoning } of messages) {
    // An answer that never began says nothing to the model.
    if (role === "assistant" && !content && !reasoning) continue;
    told.push(reasoning ? { role, content, reasoning_content: reasoning } : { role, content });
  }
  return told;
}
