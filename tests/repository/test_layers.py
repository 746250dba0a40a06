"""The layers: who may import whom, and which processes must start without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes.repository_files import ROOT

# Packages whose processes never load torch. It costs seconds and hundreds of MB each, and the engine restarts often.
TORCH_FREE = (
    "stageline_api",
    "stageline_cli",
    "stageline_gateway",
    "stageline_kubernetes",
    "stageline_local",
    "stageline_operator",
    "stageline_runtime.engine",
    "stageline_runtime.speculation",
    "stageline_runtime.trace",
    "stageline_vllm.engine",
    "stageline_vllm.supervisor",
)
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [module.name for module in pkgutil.walk_packages(package.__path__, sys.argv[1] + ".")]
names = [name for name in names if not name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
heavy = sorted({"torch", "transformers", "safetensors"} & sys.modules.keys())
print(len(names))
sys.exit(f"{sys.argv[1]} loads {heavy}" if heavy else 0)
"""


def test_imports_respect_the_layers() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", TORCH_FREE)
def test_package_loads_without_torch(package: str) -> None:
    """Every module is really imported in a fresh process: import-linter can't see an import made by a dependency."""
    command = [sys.executable, "-c", IMPORT_ALL, package]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 0, f"{package} has no modules"
