"""On the path of the real vLLM: one step of the first stage's worker raises, once the file `RAISE_FILE` is there."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "vllm.v1.worker.gpu_worker"
RAISE_FILE = "STAGELINE_TEST_RAISE_FILE"


class _Finder:
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            _patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


def _patch(module: ModuleType) -> None:
    execute = module.Worker.execute_model

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        file = Path(os.environ[RAISE_FILE])
        if self.rank == 0 and scheduler_output.total_num_scheduled_tokens and file.exists():
            file.unlink()
            raise RuntimeError("a step that was made to fail")
        return execute(self, scheduler_output)

    module.Worker.execute_model = execute_model


if RAISE_FILE in os.environ:
    sys.meta_path.insert(0, _Finder())
