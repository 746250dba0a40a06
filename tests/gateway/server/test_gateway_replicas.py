"""Several gateways before the same groups: they know nothing of each other and do the same."""

from pathlib import Path
from typing import Any

from chaos.continued_answers import TEXT, read, rest_of
from processes.gateway_harness import MODEL, RunningGateway, eventually, group, running_gateway
from processes.scripted_engine import Drop, ScriptedEngine
from stageline_gateway.settings import GatewaySettings

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x"}


def test_replicas_send_a_session_to_the_same_group_and_continue_answers_alike(
    tmp_path: Path, engine: ScriptedEngine, other_engine: ScriptedEngine
) -> None:
    settings = GatewaySettings(tmp_path / "endpoints.json", probe_timeout_seconds=60, resume_window_seconds=60)
    with running_gateway(settings) as first, running_gateway(settings) as second:
        first.serve(group(engine.url, 0), group(other_engine.url, 1))
        eventually(lambda: second.shown_groups() == first.shown_groups(), "the second reads something else")

        def group_of(gateway: RunningGateway, session: str) -> int:
            before = len(engine.requests)
            headers = {"x-session-id": session}
            assert gateway.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
            return 0 if len(engine.requests) > before else 1

        sessions = [f"session {index}" for index in range(12)]
        chosen = [group_of(first, session) for session in sessions]
        assert set(chosen) == {0, 1}, "both groups have sessions"
        assert [group_of(second, session) for session in reversed(sessions)] == chosen[::-1]
        engine.script = other_engine.script = lambda request: (
            rest_of(request) if request.generated_token_ids else rest_of(request, Drop(), 3)
        )
        for gateway in (first, second):
            seen = read(gateway.http.post("/v1/completions", json=BODY | {"stream": True}).text)
            assert (seen.text, seen.errors, seen.comments) == (TEXT, [], ["resumed"])
