"""The stand-in's HTTP server: `/health`, `/metrics`, `/v1/models` and vLLM's token-in, token-out routes.

Refusals carry vLLM's shape and statuses. `/health` reads one flag and asks no worker, as vLLM's does. A key is asked
for where vLLM asks, and not where vLLM doesn't: `/invocations` generates for everybody, unless a middleware forbids it.
"""

import importlib
import json
import os
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from processes.fake_vllm.faults import REFUSE_WITH
from processes.fake_vllm.scheduling import Request, Scheduler
from processes.fake_vllm.tokens import prompt_logprobs_of

GUARDED = ("/v1", "/v2", "/inference", "/cohere")


async def ask_for_vllms_key(http: HttpRequest, call_next: RequestResponseEndpoint) -> Response:
    """What vLLM itself does where it has a key."""
    key = os.environ.get("VLLM_API_KEY")
    is_guarded = http.method != "OPTIONS" and http.url.path.startswith(GUARDED)
    if key and is_guarded and http.headers.get("authorization") != f"Bearer {key}":
        return JSONResponse({"error": "Unauthorized"}, status_code=401)
    return await call_next(http)


class Routes:
    def __init__(self, given: Any, scheduler: Scheduler, is_dead: Callable[[], bool], eos_token_ids: list[int]) -> None:
        self._given = given
        self._scheduler = scheduler
        self._is_dead = is_dead
        self._eos = frozenset(eos_token_ids)

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
        ]
        if self._given.enable_scale_out:
            routes += [
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
                Route("/invocations", self._generate, methods=["POST"]),
            ]
        app = Starlette(routes=routes)
        app.add_middleware(BaseHTTPMiddleware, dispatch=ask_for_vllms_key)
        for path in self._given.middleware:
            module, _, name = path.rpartition(".")
            app.add_middleware(getattr(importlib.import_module(module), name))
        return app

    async def _health(self, _: HttpRequest) -> Response:
        return Response(status_code=503 if self._is_dead() else 200)

    async def _models(self, _: HttpRequest) -> Response:
        names = [*self._given.served_names, *self._given.adapters]
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def _metrics(self, _: HttpRequest) -> Response:
        scheduler = self._scheduler
        held = sum(len(request.token_ids) for request in scheduler.running)
        values = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": min(1.0, held / (self._given.max_num_seqs * self._given.max_model_len)),
            "prompt_tokens_total": scheduler.prompt_tokens,
            "generation_tokens_total": scheduler.generation_tokens,
            "iteration_tokens_total_count": scheduler.steps,
            "prefix_cache_queries_total": scheduler.prefix_queries,
            "prefix_cache_hits_total": scheduler.prefix_hits,
            "num_preemptions_total": 0,
        }
        label = f'{{engine="0",model_name="{self._given.served_names[0]}"}}'
        page = "".join(f"vllm:{name}{label} {value}\n" for name, value in values.items())
        return PlainTextResponse(f'{page}vllm:cache_config_info{{block_size="16",num_gpu_blocks="64"}} 1.0\n')

    async def _abort(self, http: HttpRequest) -> Response:
        for request_id in (await http.json())["request_ids"]:
            self._scheduler.abort(request_id)
        return Response()

    async def _generate(self, http: HttpRequest) -> Response:
        if (status := os.environ.get(REFUSE_WITH)) is not None:
            return JSONResponse({"error": HTTPStatus(int(status)).phrase}, status_code=int(status))
        body = await http.json()
        refusal = self._refusal(body)
        if refusal is not None:
            return _error(*refusal)
        sampling = body["sampling_params"]
        stops = frozenset(sampling.get("stop_token_ids") or ())
        request = Request(
            # vLLM's own prefix: an abort that leaves it out finds nothing.
            request_id=f"generate-tokens-{body.get('request_id', id(body))}",
            token_ids=list(body["token_ids"]),
            sampling=sampling,
            max_tokens=sampling.get("max_tokens") or self._given.max_model_len - len(body["token_ids"]),
            stop_token_ids=stops if sampling.get("ignore_eos") else stops | self._eos,
            priority=body.get("priority", 0),
            adapter=body["model"] if body.get("model") in self._given.adapters else None,
        )
        self._scheduler.add(request)
        if body.get("stream"):
            return StreamingResponse(self._stream(body, request), media_type="text/event-stream")
        return await self._whole(body, request)

    def _refusal(self, body: Any) -> tuple[int, str, str] | None:
        """Status, error type and words, where the request can't be taken."""
        ids, sampling = body.get("token_ids"), body.get("sampling_params")
        if not ids or sampling is None:
            return 400, "Bad Request", "token_ids and sampling_params are required"
        if sampling.get("stop") and not sampling.get("detokenize", True):
            return 400, "Bad Request", "stop strings need detokenize"
        model = body.get("model")
        if model is not None and model not in (*self._given.served_names, *self._given.adapters):
            return 404, "NotFoundError", f"The model `{model}` does not exist."
        if body.get("priority", 0) != 0 and self._given.scheduling_policy != "priority":
            return 400, "BadRequestError", "Got priority but Priority scheduling is not enabled."
        length = len(ids) + (sampling.get("max_tokens") or 1)
        if length > self._given.max_model_len:
            limit = self._given.max_model_len
            return 400, "BadRequestError", f"maximum context length is {limit} tokens, {length} were asked for"
        if (sampling.get("logprobs") or 0) > self._given.max_logprobs:
            return 400, "BadRequestError", f"at most {self._given.max_logprobs} logprobs"
        if self._is_dead():
            return 500, "InternalServerError", "EngineCore encountered an issue. See stack trace for the root cause."
        return None

    async def _stream(self, body: Any, request: Request) -> AsyncIterator[str]:
        try:
            while (choice := await request.chunks.get()) is not None:
                chunk: dict[str, Any] = {
                    "request_id": request.request_id,
                    "usage": None,
                    "output_mode": "tokens",
                    "choices": [choice],
                }
                yield f"data: {json.dumps(chunk)}\n\n"
                if choice["finish_reason"] is not None:
                    break
            else:
                yield f"data: {json.dumps(_error_body(500, 'InternalServerError', 'EngineCore died'))}\n\n"
            if (body.get("stream_options") or {}).get("include_usage"):
                chunk = {"request_id": request.request_id, "choices": [], "usage": self._usage(request)}
                yield f"data: {json.dumps(chunk)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self._scheduler.abort(request.request_id)  # a client that has left; nothing once it has ended

    def _usage(self, request: Request) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": request.num_prompt,
            "completion_tokens": request.draws,
            "total_tokens": request.num_prompt + request.draws,
        }
        if self._given.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": request.num_cached}
        return usage

    async def _whole(self, body: Any, request: Request) -> Response:
        ids: list[int] = []
        while (choice := await request.chunks.get()) is not None:
            ids += choice["token_ids"]
            if choice["finish_reason"] is not None:
                answer: dict[str, Any] = {"request_id": request.request_id, "choices": [choice | {"token_ids": ids}]}
                if (count := body["sampling_params"].get("prompt_logprobs")) is not None:
                    told = [
                        prompt_logprobs_of(token, count, self._scheduler.vocabulary) for token in body["token_ids"][1:]
                    ]
                    answer |= {"prompt_logprobs": [None, *told]}
                return JSONResponse(answer | {"model": body.get("model"), "usage": self._usage(request)})
        return _error(500, "InternalServerError", "EngineCore encountered an issue.")


def _error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse(_error_body(status, kind, message), status_code=status)
