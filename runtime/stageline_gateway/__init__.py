"""The gateway: OpenAI's API on one side, the engines of ready groups on the other.

A request's key is looked up (`keys`), its body checked (`body`, `parameters`, `openai_types`) and translated
(`translate`); it is let in (`admission`, `limits`), sent to the ready group that suits it best (`routing`, `dispatch`,
`upstream`) and answered whole or as server-sent events (`answers`, `shapes`). Groups come from `discovery`; people look
at `page`, operators at `admin`. The gateway knows the runtime by HTTP alone, holds no model, and answers bad input with
a 4xx that names the field.
"""
