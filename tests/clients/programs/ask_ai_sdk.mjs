// The AI SDK by each provider that knows one of our APIs: a tool over two turns, whole and streamed. Prints findings as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_CLIENTS}/package.json`);
const { generateText, streamText, tool, stepCountIs } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const baseURL = `${process.env.BASE_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "unused" });
const models = {
  chat: openai.chat("tiny"),
  responses: openai.responses("tiny"),
  compatible: createOpenAICompatible({ name: "stageline", baseURL })("tiny"),
  anthropic: createAnthropic({ baseURL, apiKey: "unused" })("tiny"),
};
const tools = {
  weather: tool({
    description: "Of a town",
    // A record has `propertyNames` in its schema.
    inputSchema: z.object({ town: z.string(), more: z.record(z.string(), z.string()).optional() }),
    execute: async ({ town }) => `wet in ${town}`,
  }),
};
const found = {};
for (const [name, model] of Object.entries(models)) {
  const asked = { model, tools, prompt: "Rain?", stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(asked);
  const streamed = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  found[name] = [whole.text, await streamed.text];
}
console.log(JSON.stringify(found));
