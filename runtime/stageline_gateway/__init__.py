"""The gateway: OpenAI's API on one side, the engines of ready groups on the other.

A request's key is looked up and its body read (`admission`), checked and translated (`openai_api`), admitted within
limits (`admission`), sent to the ready group that suits it best (`relay`, `groups`, `engine_client`) and answered whole
or as server-sent events (`endpoints`, `server`). The gateway knows the runtime by HTTP alone, holds no model, and
answers bad input with a 4xx that names the field.
"""
