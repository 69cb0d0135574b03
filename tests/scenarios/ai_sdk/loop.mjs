// The AI SDK against a running server: a loop with two tools, and a stream.
//
// Once, by hand, in this folder (Node 20 or newer):  npm install
// Then:  node loop.mjs http://127.0.0.1:8000/v1 MODEL
// `tests/scenarios/test_agents.py` runs it and reads the one line of JSON it prints.
//
// The demo model is too small to choose a tool by itself, so each step says what it is to
// be, and the last keeps it to letters: it would imitate the calls before. The SDK does the
// rest: it sends the tools, reads the calls, runs them, sends their results back, and ends
// at the first step without a call.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "mtplx", baseURL, includeUsage: true })(name);
const bounds = { temperature: 0, maxRetries: 0, timeout: 300_000 };

const ran = [];
const answering = (said) => (input) => {
  ran.push(input);
  return said;
};
const tools = {
  weather: tool({
    description: "Weather of a city.",
    inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: answering("sunny"),
  }),
  clock: tool({
    description: "Time in a zone.",
    inputSchema: z.object({ zone: z.enum(["UTC", "CET"]) }),
    execute: answering("noon"),
  }),
};
const once = { parallel_tool_calls: false };
const words = { structured_outputs: { regex: "[A-Z][a-z ]{9,29}[.]" } };
const steps = [
  { toolChoice: { type: "tool", toolName: "weather" }, providerOptions: { mtplx: once } },
  { toolChoice: { type: "tool", toolName: "clock" }, providerOptions: { mtplx: once } },
  { toolChoice: "none", providerOptions: { mtplx: words } },
];

const loop = await generateText({
  ...bounds,
  model,
  tools,
  prompt: "What are the weather and the time?",
  maxOutputTokens: 40,
  prepareStep: ({ stepNumber }) => steps[stepNumber],
  stopWhen: stepCountIs(5),
});

const stream = streamText({
  ...bounds,
  model,
  prompt: "What is the capital of France? Answer briefly.",
  maxOutputTokens: 12,
});
const pieces = [];
for await (const piece of stream.textStream) pieces.push(piece);

console.log(
  JSON.stringify({
    steps: loop.steps.map((step) => ({
      reason: step.finishReason,
      calls: step.toolCalls.map((call) => call.toolName),
      results: step.toolResults.map((result) => result.output),
    })),
    ran,
    text: loop.text,
    streamed: {
      pieces,
      reason: await stream.finishReason,
      outputTokens: (await stream.usage).outputTokens,
    },
  }),
);
