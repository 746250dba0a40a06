"""Names the weights in a model directory, so that stages and groups can check that they hold the same ones.

A cache entry is named by the source in its manifest: a commit, or a file's hash. All fetched files were checked against
it. That also covers shards that are not fetched yet. A user's own directory has no manifest. It is named by its config
and its weight files: their names, sizes, first bytes (where tensors are listed) and evenly spread samples. That costs a
few reads per file and distinguishes models, versions and fine-tuned copies. It doesn't detect tampering with a few
bytes between the samples.
"""

import hashlib
from pathlib import Path
from typing import Final

from stageline_runtime.prepare.cache import read_manifest

SAMPLES: Final = 16
SAMPLE_BYTES: Final = 16 * 1024
DIGITS: Final = 32
_WEIGHTS: Final = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def weights_digest(model_dir: Path) -> str:
    """32 hexadecimal digits; empty if nothing can be read: the loader reports that better."""
    manifest = read_manifest(model_dir)
    if manifest is not None:
        return _digest_of(f"manifest\0{manifest.resolved}\0{manifest.converter_version}".encode())
    try:
        files = sorted(path for path in model_dir.iterdir() if path.suffix in _WEIGHTS and path.is_file())
        config = (model_dir / "config.json").read_bytes()
        parts = [b"files", hashlib.sha256(config).digest(), *(_sampled(path) for path in files)]
    except OSError:
        return ""
    return _digest_of(b"\0".join(parts)) if files else ""


def _sampled(path: Path) -> bytes:
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(f"{path.name}\0{size_bytes}\0".encode())
    with path.open("rb") as file:
        for sample in range(SAMPLES):
            # The last one ends where the file does.
            file.seek(max(0, size_bytes - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
