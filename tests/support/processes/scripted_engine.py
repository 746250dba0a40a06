"""An engine that says what a test tells it to: a real socket, real HTTP, scripted events.

Each request runs the steps that `script(request)` returns. It serves on loopback in a thread of its own and keeps what
it was asked and which requests their client left early.
"""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Final

from stageline_api.engine_access import is_admitted
from stageline_api.engine_http import (
    Admitted,
    Delta,
    EngineError,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    HeldPrefixes,
    PromptTokens,
    Refused,
    Wire,
)
from stageline_api.health import EngineStatus, Phase
from stageline_api.multiplexing import MULTIPLEXED_PATH, ClientLine, LineCutter, Word, client_line


@dataclass(frozen=True)
class Say:
    """Send one event."""

    event: Admitted | PromptTokens | Delta | Finished | Failed


@dataclass(frozen=True)
class Raw:
    """Send these bytes inside the body."""

    content: bytes


@dataclass(frozen=True)
class Hold:
    """Send nothing until `ScriptedEngine.release`."""


@dataclass(frozen=True)
class Pause:
    """Send nothing for a while."""

    seconds: float


@dataclass(frozen=True)
class KeepSaying:
    """Send one event again and again, with pauses, until `ScriptedEngine.hush`."""

    event: Delta
    pause_seconds: float


@dataclass(frozen=True)
class Drop:
    """Break the connection without ending the body."""


@dataclass(frozen=True)
class Refuse:
    """Answer with a status and an error; only as the first step."""

    status: int
    error: EngineError | None


_HEAD: Final = ("HTTP/1.1 200 OK", "content-type: application/x-ndjson", "transfer-encoding: chunked")

Step = Say | Raw | Hold | Pause | KeepSaying | Drop | Refuse
Script = Callable[[GenerateRequest], list[Step]]


def answer(*texts: str, prompt_tokens: int = 3, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    """A good answer: one delta of one token per text."""
    deltas = [Say(Delta(text=text, token_ids=(index,))) for index, text in enumerate(texts)]
    end = Finished(reason=reason, prompt_tokens=prompt_tokens, completion_tokens=len(texts))
    return [Say(Admitted(prompt_tokens=prompt_tokens)), *deltas, Say(end)]


_LISTENING: Final = frozenset({"url", "address", "port", "tls", "_loop", "_release", "_server", "_thread"})
"""What of an engine is how it listens."""


@dataclass
class ScriptedEngine:
    """Call `start`, use `url`, call `stop`."""

    script: Script = lambda _: answer("Hello", " world")
    requests: list[GenerateRequest] = field(default_factory=list)
    replies: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and JSON by what else may be asked, as `POST /v1/tokenize`."""
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    """What of that was asked, with bodies."""
    asked_with: list[dict[str, str]] = field(default_factory=list)
    """The headers of that, their names in lower case."""
    keys: tuple[str, ...] = ()
    """What it asks for; probes need none."""
    num_probes: int = 0
    """How often its readiness was asked."""
    left_early: list[str] = field(default_factory=list)
    """Request ids whose client closed the connection before the script's end."""
    url: str = ""
    address: str = "127.0.0.1"
    port: int = 0
    """A free one, where it is 0."""
    served_name: str = "tiny"
    group: int | None = None
    incarnation: int | None = None
    phase: Phase = Phase.READY
    """What it tells those who probe it."""
    queue_room: int | None = None
    """How many more requests may wait, as it tells them too."""
    slots: int | None = None
    """How many can run at once, likewise."""
    running: int = 0
    """How many it says do, whoever sent them."""
    weights: str = ""
    """Digest of those it says it computes with."""
    held: tuple[str, ...] = ()
    """Names of beginnings of prompts that it says its cache holds."""
    said_on_shared: list[ClientLine] = field(default_factory=list)
    """What was said on such connections, in order."""
    num_shared: int = 0
    """How many there were."""
    answers_probes: bool = True
    holds_questions: bool = False
    """Answers what else is asked only after `release`."""
    tls: ssl.SSLContext | None = None
    """Speaks HTTPS with this certificate; set before `start`."""
    probes: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _release: asyncio.Event = field(default_factory=asyncio.Event)
    _hushed: bool = False
    _server: asyncio.Server | None = None
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen on a loopback port."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(60), "the scripted engine did not start"

    def stop(self) -> None:
        """Break all connections and stop listening."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(60)

    def forget(self) -> None:
        """Be as one that was only just started: what it was asked and told to do is gone."""
        for each in fields(self):
            if each.name not in _LISTENING:
                setattr(self, each.name, each.default if each.default_factory is MISSING else each.default_factory())
        self.hold()

    def release(self) -> None:
        """Let every `Hold` go on."""
        self._loop.call_soon_threadsafe(self._release.set)

    def hold(self) -> None:
        """Let every `Hold` from now on wait for the next `release`."""
        self._loop.call_soon_threadsafe(self._release.clear)

    def hush(self) -> None:
        """Let every `KeepSaying` go on."""
        self._hushed = True

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._serve, self.address, self.port, backlog=1024, ssl=self.tls)
        server = self._loop.run_until_complete(serving)
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://{self.address}:{self.port}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(_end(server))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                asked, headers, body = await _read_request(reader)
                if asked == "GET /readyz":
                    self.num_probes += 1
                    await self._answer_probe(reader, writer)
                    return
                if not is_admitted(self.keys, headers):
                    missing = EngineError(code=ErrorCode.KEY_MISSING, message="no key")
                    await _refuse(Refuse(401, missing), writer)
                    return
                if asked == "GET /v1/prefixes":
                    await self._say(writer, HeldPrefixes(keys=self.held))
                    return
                if asked == f"POST {MULTIPLEXED_PATH}":
                    await self._share(reader, writer)
                else:
                    self.asked_with.append(headers)
                    await self._reply(asked, body, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                return  # the client left before it had asked anything
        except asyncio.CancelledError:
            writer.transport.abort()  # the engine stops; asyncio's streams log a task that ends cancelled
        finally:
            writer.transport.abort() if writer.transport.is_closing() else writer.close()

    async def _say(self, writer: asyncio.StreamWriter, model: Wire) -> None:
        body = model.to_json()
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def _reply(self, asked: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.asked.append((asked, body))
        if self.holds_questions:
            await self._release.wait()
        status, content = self.replies[asked.partition("?")[0]]
        head = f"HTTP/1.1 {status} Said\r\ncontent-length: {len(content.encode())}\r\nconnection: close\r\n\r\n"
        writer.write((head + content).encode())
        await writer.drain()

    async def _answer_probe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.probes += 1
        if not self.answers_probes:
            await reader.read()
            return
        body = self._status().model_dump_json().encode()
        status = "200 OK" if self.phase is Phase.READY else "503 Not ready"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    def _status(self) -> EngineStatus:
        return EngineStatus(
            phase=self.phase,
            served_name=self.served_name,
            group=self.group,
            incarnation=self.incarnation,
            queue_room=self.queue_room,
            slots=self.slots,
            requests_running=self.running,
            weights=self.weights,
        )

    async def _share(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Many requests, each by its script. A `Drop` breaks the connection for all of them."""
        self.num_shared += 1
        writer.write("\r\n".join([*_HEAD, "", ""]).encode())
        streams: dict[int, asyncio.Task[None]] = {}
        ids: dict[int, str] = {}
        goes_on: dict[int, asyncio.Event] = {}
        try:
            async for line in _lines(reader):
                said = client_line(line)
                self.said_on_shared.append(said)
                number = said.stream
                if said.word is Word.OPEN:
                    request = GenerateRequest.from_json(said.request)
                    self.requests.append(request)
                    ids[number] = request.request_id
                    goes_on[number] = asyncio.Event()
                    goes_on[number].set()
                    play = self._play_shared(number, self.script(request), writer, goes_on[number])
                    streams[number] = asyncio.create_task(play)
                elif said.word is Word.HOLD:
                    goes_on[number].clear()
                elif said.word is Word.GO_ON:
                    goes_on[number].set()
                elif not streams[number].done():
                    streams.pop(number).cancel()
                    self.left_early.append(ids[number])
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for task in streams.values():
                task.cancel()
            await asyncio.gather(*streams.values(), return_exceptions=True)
            self.left_early += [ids[number] for number, task in streams.items() if task.cancelled()]

    async def _play_shared(
        self, number: int, steps: list[Step], writer: asyncio.StreamWriter, goes_on: asyncio.Event
    ) -> None:
        if isinstance(steps[0], Refuse):
            if steps[0].error is None:  # there are no words for that on a shared connection
                writer.transport.abort()
                return
            _chunk(writer, b"%d %b\n" % (number, Refused(error=steps[0].error).to_json()))
        else:
            is_there = await self._take_steps(steps, writer, b"%d " % number, goes_on)
            last = steps[-1]
            if is_there and not (isinstance(last, Say) and isinstance(last.event, Finished | Failed)):
                writer.transport.abort()  # as the body of one by itself would end

    async def _take_steps(
        self, steps: list[Step], writer: asyncio.StreamWriter, prefix: bytes, goes_on: asyncio.Event
    ) -> bool:
        """Returns whether the connection is still there. Each line begins with `prefix`."""
        for step in steps:
            await goes_on.wait()
            match step:
                case Say(event=event):
                    _chunk(writer, prefix + event.to_json() + b"\n")
                case Raw(content=content):
                    _chunk(writer, prefix + content)
                case Hold():
                    await self._release.wait()
                case Pause(seconds=seconds):
                    await asyncio.sleep(seconds)
                case KeepSaying(event=event, pause_seconds=seconds):
                    while not self._hushed:
                        _chunk(writer, prefix + event.to_json() + b"\n")
                        await asyncio.sleep(seconds)
                case Drop():
                    await writer.drain()
                    writer.transport.abort()
                    return False
                case Refuse():
                    raise AssertionError("Refuse must be the first step")
            await writer.drain()
        return True


async def _end(server: asyncio.Server) -> None:
    """Stop accepting, let what was accepted begin, then close everything.

    A server that is closed between accepting a connection and serving it leaves that connection open, and a task that
    is cancelled before it began does too.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(5):
        await asyncio.sleep(0)
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(5):
        await asyncio.sleep(0)


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a chunked body."""
    cutter = LineCutter()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        for line in cutter.cut((await reader.readexactly(size + 2))[:-2]):
            yield line


def _chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


async def _refuse(step: Refuse, writer: asyncio.StreamWriter) -> None:
    body = step.error.to_json() if step.error is not None else b"not an error body"
    writer.write(f"HTTP/1.1 {step.status} Refused\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """Method and path, headers by name in lower case, and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    named = (line.split(": ", 1) for line in lines if line)
    headers = {name.lower(): value for name, value in named}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return first.removesuffix(" HTTP/1.1"), headers, body
