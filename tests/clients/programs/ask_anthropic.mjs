// Anthropic's JavaScript client: a tool over two turns beside a tool of a server, whole and streamed. Prints findings as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_CLIENTS}/package.json`);
const Anthropic = require("@anthropic-ai/sdk").default;
const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: "unused", maxRetries: 0 });
const input_schema = { type: "object", properties: { town: { type: "string" } }, required: ["town"] };
const tools = [
  { name: "weather", input_schema },
  { type: "web_search_20250305", name: "web_search" },
];
const asked = { model: "tiny", max_tokens: 500, tools };
const user = { role: "user", content: "Rain?" };
const texts = [];
let requestId;
for (const streams of [false, true]) {
  const send = async (messages) => {
    if (streams) return client.messages.stream({ ...asked, messages }).finalMessage();
    const answered = await client.messages.create({ ...asked, messages });
    requestId = answered._request_id;
    return answered;
  };
  const called = await send([user]);
  const call = called.content.find((block) => block.type === "tool_use");
  const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "aGk=" } };
  const content = [{ type: "text", text: `wet in ${call.input.town}` }, image];
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content }] };
  const second = await send([user, { role: "assistant", content: called.content }, result]);
  texts.push(second.content[0].text);
}
const counted = await client.messages.countTokens({ model: "tiny", messages: [user], tools });
console.log(JSON.stringify({ texts, counted: counted.input_tokens > 0, has_id: Boolean(requestId) }));
