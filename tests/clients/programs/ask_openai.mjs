// OpenAI's JavaScript client: a tool over two turns, by chats and by responses, whole and streamed. Prints findings as JSON.
import { createRequire } from "node:module";

const require = createRequire(`${process.env.NODE_CLIENTS}/package.json`);
const OpenAI = require("openai").default;
const client = new OpenAI({ baseURL: `${process.env.BASE_URL}/v1`, apiKey: "unused", maxRetries: 0 });
const parameters = { type: "object", properties: { town: { type: "string" } }, required: ["town"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const user = { role: "user", content: "Rain?" };

const called = await client.chat.completions.create({ model: "tiny", messages: [user], tools });
const message = called.choices[0].message;
const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "wet" };
const second = await client.chat.completions.create({ model: "tiny", messages: [user, message, result], tools });

const runner = client.chat.completions.runTools({
  model: "tiny",
  messages: [user],
  stream: true,
  tools: [{ type: "function", function: { name: "weather", parameters, parse: JSON.parse, function: ({ town }) => `wet in ${town}` } }],
});

const ours = [{ type: "function", name: "weather", parameters, strict: false }, { type: "web_search" }];
const input = [user];
const stream = client.responses.stream({ model: "tiny", input, tools: ours });
const first = await stream.finalResponse();
const call = first.output.find((item) => item.type === "function_call");
input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output: "wet" });
const { data, response } = await client.responses.create({ model: "tiny", input, tools: ours }).withResponse();
console.log(
  JSON.stringify({
    call: JSON.parse(message.tool_calls[0].function.arguments),
    second: second.choices[0].message.content,
    runner: await runner.finalContent(),
    response: data.output_text,
    ignored: response.headers.get("x-stageline-ignored"),
  }),
);
