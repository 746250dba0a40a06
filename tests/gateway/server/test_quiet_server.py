"""A server that is told to stop wakes for nothing but its answers' `Date`."""

import asyncio
import socket

import pytest
import uvicorn

from stageline_gateway.server import serve


def test_it_stops_at_once_when_it_is_told_and_looks_for_it_at_no_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_DATE_SECONDS", 600.0)
    ticks: list[int] = []
    looked = asyncio.Event()

    class Counted(serve._QuietServer):
        async def on_tick(self, counter: int) -> bool:
            ticks.append(counter)
            looked.set()
            return await super().on_tick(counter)

    async def run() -> None:
        config = uvicorn.Config(lambda *_: None, log_config=None, lifespan="off")
        server = Counted(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with asyncio.timeout(60):
                serving = asyncio.create_task(server.serve(sockets=[listening]))
                await looked.wait()
                await asyncio.sleep(0.3)  # uvicorn's own looks three times in it
                assert ticks == [0]
                assert server.server_state.default_headers[0][0] == b"date"
                server.stop()
                await serving
        assert ticks == [0, 0]

    asyncio.run(run())


def test_a_date_is_of_the_last_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_DATE_SECONDS", 0.01)
    told = asyncio.Event()

    class Counted(serve._QuietServer):
        count = 0

        async def on_tick(self, counter: int) -> bool:
            assert counter % 10 == 0, "uvicorn makes the Date at each tenth look only"
            self.count += 1
            if self.count == 5:
                told.set()
            return await super().on_tick(counter)

    async def run() -> None:
        server = Counted(uvicorn.Config(lambda *_: None, log_config=None, lifespan="off"))
        async with asyncio.timeout(60):
            looking = asyncio.create_task(server.main_loop())
            await told.wait()
            server.stop()
            await looking

    asyncio.run(run())
