"""The gateway: OpenAI's API on one side, the engines of ready groups on the other.

A request is checked (`body`, `parameters`, `openai_types`), translated (`translate`), sent to the least loaded ready
group (`routing`, `dispatch`, `upstream`) and answered whole or as server-sent events (`answers`). Groups come from
`discovery`. The gateway knows the runtime by HTTP alone, holds no model, and answers bad input with a 4xx that names
the field.
"""
