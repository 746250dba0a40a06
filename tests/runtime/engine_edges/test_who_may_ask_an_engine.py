"""An engine with keys answers to who shows one, save probes; what it says of itself is read without, and only read."""

import asyncio
from pathlib import Path

import httpx
import pytest

from processes.scripted_core_server import ScriptedCore, says, serve, serve_state
from stageline_api.engine_access import authorization
from stageline_api.health import Phase

KEYS = ("new-key-0123456789", "old-key-0123456789")
GENERATE = ("POST", "/v1/generate", {"request_id": "r1", "prompt": {"kind": "text", "text": "hello"}})
KEYED = (
    GENERATE,
    ("POST", "/v1/tokenize", {"prompt": {"kind": "text", "text": "hello"}}),
    ("POST", "/v1/detokenize", {"token_ids": [5]}),
    ("POST", "/v1/drain", None),
    ("GET", "/v1/prefixes", None),
    ("GET", "/v1/info", None),
    ("GET", "/status", None),
    ("GET", "/metrics", None),
)
STATE = ("/status", "/healthz", "/readyz", "/metrics", "/stages", "/clock")


def test_without_a_key_nothing_but_probes_is_answered_and_nothing_is_done(tmp_path: Path) -> None:
    async def run() -> None:
        core = ScriptedCore(script=says("ok"))
        async with serve(core, tmp_path, keys=KEYS) as client:
            for shown in ({}, {"authorization": "Bearer wrong-key-0123456789"}):
                for method, path, body in KEYED:
                    refused = await client.request(method, path, json=body, headers=shown)
                    assert (refused.status_code, refused.json()["code"]) == (401, "key_missing"), path
                    assert refused.headers["www-authenticate"] == "Bearer"
                    assert not any(key in refused.text for key in KEYS)
            assert (core.submitted, core.phase) == ([], Phase.READY)
            assert [(await client.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]

    asyncio.run(run())


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_everything(tmp_path: Path, key: str) -> None:
    async def run() -> list[int]:
        async with serve(ScriptedCore(script=says("ok")), tmp_path, keys=KEYS) as client:
            client.headers["authorization"] = authorization([key])
            return [(await client.request(method, path, json=body)).status_code for method, path, body in KEYED]

    assert asyncio.run(run()) == [200, 200, 200, 202, 200, 200, 200, 200]


def test_the_port_of_the_state_reads_and_does_nothing_else() -> None:
    async def run() -> None:
        core = ScriptedCore(script=says("ok"))
        async with serve_state(core) as client:
            for path in STATE:
                assert (await client.get(path)).status_code == 200, path
                assert (await client.post(path, json={})).status_code == 405, path
            for method, path, body in KEYED[:6]:
                absent = await client.request(method, path, json=body)
                assert (absent.status_code, absent.json()["code"]) == (404, "not_found"), path
            page = await client.get("/metrics", headers={"origin": "http://evil.example"})
            assert page.status_code == 403
            assert (core.submitted, core.phase) == ([], Phase.READY)

    asyncio.run(run())


def test_the_probes_of_a_drained_engine_say_so_on_both_ports(tmp_path: Path) -> None:
    async def run() -> list[httpx.Response]:
        core = ScriptedCore(script=says("ok"))
        async with serve(core, tmp_path, keys=KEYS) as client, serve_state(core) as state:
            await client.post("/v1/drain", headers={"authorization": authorization(KEYS)})
            return [await each.get("/readyz") for each in (client, state)]

    assert [answer.status_code for answer in asyncio.run(run())] == [503, 503]
