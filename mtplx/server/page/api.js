// Talking to the server: the key, errors in words, streams of events.

const KEY = "mtplx.key";

let key = "";
try {
  key = localStorage.getItem(KEY) ?? "";
} catch {
  // Storage may be forbidden; the key is then kept until the page is left.
}

export const hasKey = () => key !== "";

export function keepKey(sent) {
  key = sent;
  try {
    if (key) localStorage.setItem(KEY, key);
    else localStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = (more = {}) => (key ? { Authorization: `Bearer ${key}`, ...more } : more);

async function answerOf(promise) {
  let answer;
  try {
    answer = await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (answer.ok) return answer;
  let message = `The server answered with status ${answer.status}.`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not in the usual shape; the status says enough.
  }
  throw new ApiError(answer.status, message);
}

export async function getJson(path) {
  return (await answerOf(fetch(path, { headers: headers() }))).json();
}

// What the server tells of itself. Without a key where one is needed that is a status and
// no error: a question that is sure to fail is not asked.
export async function getHealth() {
  const answer = await fetch("/health", { headers: headers() }).catch(() => null);
  if (!answer) throw new ApiError(0, "The server does not answer. Is it still running?");
  return answer.json();
}

export async function* streamEvents(path, { body, signal }) {
  const request = { signal, headers: headers() };
  if (body) {
    request.method = "POST";
    request.headers = headers({ "Content-Type": "application/json" });
    request.body = JSON.stringify(body);
  }
  const answer = await answerOf(fetch(path, request));
  for await (const data of eventsOf(answer.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(200, event.error.message);
    yield event;
  }
}

// The data of each server-sent event. The server writes it in one line.
async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The connection to the server broke off.");
      });
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
