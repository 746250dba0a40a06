"""Finds tensors by name in a Hugging Face safetensors directory, whole or sharded, opening only what is needed.

Headers tell a tensor's shape without reading its data. Every problem is a `WeightsError` that names tensor and file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from stageline_api.errors import UserError
from stageline_api.failures import ExitCode

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


class WeightsError(UserError):
    """The checkpoint can't give the stage its weights; the message names the tensor and the file."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.MODEL_LOAD)


def files_of_tensors(model_dir: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Group tensor names by the file that holds them.

    Raises:
        WeightsError: no checkpoint is there, its index is broken, or it lacks a tensor.
    """
    index_path = model_dir / _INDEX_FILE
    if not index_path.exists():
        path = model_dir / _SINGLE_FILE
        if not path.exists():
            raise WeightsError(f"{model_dir} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}")
        return {path: list(names)}
    shard_of_tensor = _read_index(index_path)
    grouped: dict[Path, list[str]] = {}
    for name in names:
        if name not in shard_of_tensor:
            raise WeightsError(f"tensor {name} is missing from {index_path}")
        grouped.setdefault(model_dir / shard_of_tensor[name], []).append(name)
    return grouped


def tensor_names(model_dir: Path) -> frozenset[str]:
    """Names of all tensors, from the index or the single file's header.

    Raises:
        WeightsError: no checkpoint is there, or it is unreadable.
    """
    index_path = model_dir / _INDEX_FILE
    if index_path.exists():
        return frozenset(_read_index(index_path))
    (path,) = files_of_tensors(model_dir, ())
    with _Shard(path) as shard:
        return shard.names


def check_shapes(model_dir: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check from the headers alone that each tensor is there with its shape `[...]`.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    for path, names in files_of_tensors(model_dir, expected).items():
        with _Shard(path) as shard:
            for name in names:
                shape = shard.shape(name)
                if shape != expected[name]:
                    raise WeightsError(
                        f"tensor {name} in {path} has shape {list(shape)}; config.json asks for {list(expected[name])}"
                    )


def read_tensors(model_dir: Path, names: Iterable[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each named tensor, copied out of its file and cast to `dtype`, file by file in the order of `names`.

    Raises:
        WeightsError: a tensor is missing or a file is unreadable.
    """
    for path, in_file in files_of_tensors(model_dir, names).items():
        with _Shard(path) as shard:
            for name in in_file:
                # A copy: a view of the mapped file would be paged in during the first steps.
                yield name, shard.tensor(name).to(dtype, copy=True)


class _Shard:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = cast(Any, safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} can't be read: {error}") from error
        self.names = frozenset(self._file.keys())

    def __enter__(self) -> "_Shard":
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(*exception)

    def shape(self, name: str) -> tuple[int, ...]:
        self._check(name)
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        self._check(name)
        try:
            tensor = self._file.get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"tensor {name} in {self._path} can't be read: {error}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise WeightsError(f"tensor {name} is missing from {self._path}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} is not a safetensors index: {error}") from error
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{path} is not a safetensors index: weight_map must be an object")
    return {str(name): str(file) for name, file in weight_map.items()}
