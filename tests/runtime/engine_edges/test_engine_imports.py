"""The engine process never loads torch or transformers, whichever of its modules is used."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import stageline_runtime.engine as engine
names = [module.name for module in pkgutil.walk_packages(engine.__path__, "stageline_runtime.engine.")]
for name in names:
    importlib.import_module(name)
assert "stageline_runtime.engine.edge.routes" in names, names
heavy = sorted({module.partition(".")[0] for module in sys.modules} & {"torch", "transformers", "safetensors", "numpy"})
print(f"heavy={heavy}")
"""


def test_no_module_of_the_engine_loads_torch_or_transformers() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "heavy=[]", result.stdout
