"""Brings images into the stores of the nodes: archives that `make images` has exported, and the pause image.

A 6 GB image takes two minutes to unpack and twice its size on disk, so it is done once for each image, in the first
node's store; the others get theirs by hard links, since nothing ever writes into an unpacked layer.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node.real_node import PAUSE_IMAGE, RealNode

_IMPORTED: Final = "imported.json"
"""In a store: the id of every image that it has, by the archive's name."""


def fill_stores(nodes: Sequence[RealNode], archives: Path, pause: Path) -> None:
    """Every store has every image afterwards. An archive is deleted once it is in a store; its `.id` file stays."""
    first, *others = nodes
    wanted = {file.stem: file.read_text().strip() for file in sorted(archives.glob("*.id"))}
    assert wanted, f"no exported images in {archives}: scripts/test-node makes them"
    if _imported(first) != wanted:
        _import_all(first, archives, pause, wanted)
    for node in others:
        if _imported(node) != wanted:
            _clone(first.store, node.store)


def _imported(node: RealNode) -> dict[str, str]:
    file = node.store / _IMPORTED
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _import_all(node: RealNode, archives: Path, pause: Path, wanted: dict[str, str]) -> None:
    have = _imported(node)
    node.directory.mkdir(parents=True, exist_ok=True)
    node.start_containerd()
    try:
        small = node.directory / "pause.tar"
        _write_pause_archive(small, pause)
        node.ctr("images", "import", str(small))
        for name, image_id in wanted.items():
            archive = archives / f"{name}.tar"
            if have.get(name) == image_id:
                continue
            assert archive.exists(), f"{archive} is gone, and the store has an older one: remove {archives}"
            _say(f"{node.name} imports {name} ({archive.stat().st_size >> 20} MiB)")
            _forget(node, name)
            node.ctr("images", "import", str(archive))
            archive.unlink()
            have[name] = image_id
            (node.store / _IMPORTED).write_text(json.dumps(have))
    finally:
        node.stop("containerd")


def _forget(node: RealNode, name: str) -> None:
    """Give back the room of an older image of the name, which nothing runs any more."""
    older = [each for each in node.ctr("images", "list", "--quiet").split() if f"/{name}:" in each]
    if older:
        node.ctr("images", "delete", "--sync", *older)


def _clone(source: Path, target: Path) -> None:
    """Hard links of everything but containerd's own databases, which it writes into."""
    _say(f"{target.name} becomes a copy of {source.name} by links")
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-al", str(source), str(target)], check=True, timeout=600)
    for database in target.rglob("*.db"):
        if database.parent.name.startswith("io.containerd."):
            original = source / database.relative_to(target)
            database.unlink()
            shutil.copy2(original, database)
    # So that writing one does not write the other.
    (target / _IMPORTED).unlink()
    shutil.copy2(source / _IMPORTED, target / _IMPORTED)


def _write_pause_archive(file: Path, program: Path) -> None:
    """An image of one program, in the form of `docker save`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(os.path.realpath(program), arcname="pause")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [PAUSE_IMAGE], "Layers": ["layer.tar"]}]).encode()
    parts = {config_name: config, "manifest.json": manifest, "layer.tar": layer.getvalue()}
    with tarfile.open(file, "w") as tar:
        for name, content in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _say(sentence: str) -> None:
    sys.stderr.write(f"real nodes: {sentence}\n")
    sys.stderr.flush()
