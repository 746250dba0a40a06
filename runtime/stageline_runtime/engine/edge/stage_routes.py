"""`GET /stages` and `GET /clock` of the engine: where its stages answer and how their clocks compare with its own."""

from collections.abc import Callable

from fastapi import FastAPI, Response

from stageline_api.telemetry.timeline import GroupClocks, GroupStages


def add_stage_routes(app: FastAPI, stages: Callable[[], GroupStages], clocks: Callable[[], GroupClocks]) -> None:
    """Add both; each answers with what is known at the moment, also while the group still forms."""

    @app.get("/stages")
    async def answer_stages() -> Response:
        return Response(stages().model_dump_json(), media_type="application/json")

    @app.get("/clock")
    async def answer_clock() -> Response:
        return Response(clocks().model_dump_json(), media_type="application/json")
