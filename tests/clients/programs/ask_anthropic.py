"""Anthropic's client: a message, a stream, a call that has to be made, whole and cut off, and what comes back of it in
a second turn. Prints findings as JSON."""

import importlib
import json
import os

anthropic = importlib.import_module("anthropic")
client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key="unused", max_retries=0, timeout=120)
turns = [{"role": "user", "content": "Hi"}]
town = {"type": "object", "properties": {"town": {"enum": ["Oslo", "Rom"]}}, "required": ["town"]}
tool = {"name": "place", "input_schema": town | {"additionalProperties": False}}
brief = {"model": "tiny", "max_tokens": 6, "messages": turns, "extra_body": {"temperature": 0}}
whole = client.messages.create(system="Be brief.", **brief)
counted = client.messages.count_tokens(model="tiny", messages=turns, system="Be brief.")
with client.messages.stream(system="Be brief.", **brief) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
called = client.messages.create(
    model="tiny", max_tokens=500, messages=turns, tools=[tool], tool_choice={"type": "tool", "name": "place"}
)
call = called.content[0]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "wet"}
second = [*turns, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
goes_on = client.messages.create(model="tiny", max_tokens=6, messages=second)
forced = {"model": "tiny", "messages": turns, "tools": [tool], "tool_choice": {"type": "tool", "name": "place"}}
after_cut = []
with client.messages.stream(max_tokens=3, **forced) as stream:
    begun = stream.get_final_message()
for cut in (begun, client.messages.create(max_tokens=3, **forced)):
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "?"} for block in cut.content]
    told = results or "So?"
    third = [*turns, {"role": "assistant", "content": cut.content}, {"role": "user", "content": told}]
    answered = client.messages.create(model="tiny", max_tokens=6, messages=third)
    after_cut.append([cut.stop_reason, len(cut.content), answered.role])
try:
    client.messages.create(model="absent", max_tokens=6, messages=turns)
    refusal = ""
except anthropic.NotFoundError as error:
    refusal = error.body["error"]["type"]
found = {
    "whole": whole.content[0].text,
    "streamed": text,
    "stop_reason": final.stop_reason,
    "output_tokens": final.usage.output_tokens,
    "call": [called.stop_reason, called.content[0].name, sorted(called.content[0].input)],
    "second": goes_on.stop_reason,
    "after_cut": after_cut,
    "refusal": refusal,
    "counted": [counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens],
}
print(json.dumps(found))  # noqa: T201 - what the test reads
