"""Finds tensors by name in a Hugging Face safetensors directory, whole or sharded; opens only the files it needs.

A quantised matrix has the name and shape of its unquantised form, and is read as that, so callers see no difference.
`parts_of` gives the stored form, `config.json` how to read it. Headers give a tensor's shape without reading its data.
Every problem is a `WeightsError` that names tensor and file.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from stageline_api.errors import UserError
from stageline_api.failures import ExitCode
from stageline_runtime.model_facts.model_fields import UnsupportedModelError, read_json
from stageline_runtime.model_facts.quantization import (
    Quantization,
    Shape,
    dense_names,
    parts_of,
    quantization_of,
)
from stageline_runtime.model_facts.rank_cut import TensorSlice
from stageline_runtime.model_facts.weight_files import INDEX_FILE, SINGLE_FILE, read_weight_map
from stageline_runtime.models.weights.dequantization import QuantizedTensorError, dense_shape, dequantize


class WeightsError(UserError):
    """The checkpoint can't give the stage its weights; the message names the tensor and the file."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.MODEL_LOAD)


def files_of_tensors(model_dir: Path, names: Iterable[str]) -> dict[Path, list[str]]:
    """Group what the tensors are stored as by the file that holds it.

    Raises:
        WeightsError: no checkpoint is there, its index is broken, or it lacks a tensor.
    """
    place_of = _places(model_dir)
    grouped: dict[Path, list[str]] = {}
    for name in names:
        for part in parts_of(name, place_of.keys()):
            grouped.setdefault(_place(place_of, part, model_dir), []).append(part)
    return grouped


def tensor_names(model_dir: Path) -> frozenset[str]:
    """Names of all tensors, from the index or the single file's header.

    Raises:
        WeightsError: no checkpoint is there, or it is unreadable.
    """
    return dense_names(_places(model_dir).keys())


def check_shapes(model_dir: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check from the headers alone that each tensor is there with its shape `[...]`.

    Raises:
        WeightsError: a tensor is missing or misshapen, or a file is unreadable.
    """
    with _Shards(model_dir) as shards:
        for name, wanted in expected.items():
            shape = shards.shape(name)
            if shape != wanted:
                raise WeightsError(
                    f"tensor {name} in {shards.path(name)} has shape {list(shape)}; config.json asks for {list(wanted)}"
                )


def read_tensors(
    model_dir: Path, names: Iterable[str], dtype: torch.dtype, slices: Mapping[str, TensorSlice | None] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each named tensor, copied out of its file, dequantised if need be, and cast to `dtype`, in the order of
    `names`. Of a tensor in `slices` only that part is read; of a quantised one, all is, and the part is kept.

    Raises:
        WeightsError: a tensor is missing or a file is unreadable.
    """
    with _Shards(model_dir) as shards:
        for name in names:
            yield name, shards.tensor(name, dtype, None if slices is None else slices.get(name))


class _Shards(ExitStack):
    """The files of a checkpoint, each opened when something in it is asked for."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        self._model_dir = model_dir
        self._places = _places(model_dir)
        self._open: dict[Path, _Shard] = {}
        self._quantization: Quantization | None = None

    def path(self, name: str) -> Path:
        return _place(self._places, parts_of(name, self._places.keys())[0], self._model_dir)

    def shape(self, name: str) -> Shape:
        parts = parts_of(name, self._places.keys())
        if len(parts) == 1:
            return self._shard(name).shape(name)
        shapes = {part.rpartition(".")[2]: self._shard(part).shape(part) for part in parts}
        try:
            return dense_shape(self._how(name), shapes)
        except QuantizedTensorError as error:
            raise WeightsError(f"tensor {name} in {self.path(name)}: {error}") from error

    def tensor(self, name: str, dtype: torch.dtype, part: TensorSlice | None = None) -> torch.Tensor:
        parts = parts_of(name, self._places.keys())
        if len(parts) == 1:
            tensor = self._shard(name).tensor(name, part)
            if tensor.element_size() == 1 and tensor.is_floating_point():
                raise WeightsError(f"tensor {name} in {self.path(name)} is {tensor.dtype}, and has no scale beside it")
            # A copy: a view of the mapped file would be paged in during the first steps.
            return tensor.to(dtype, copy=True)
        stored = {stored_as.rpartition(".")[2]: self._shard(stored_as).tensor(stored_as) for stored_as in parts}
        try:
            whole = dequantize(self._how(name), stored, dtype)
            # A copy: the part alone must not keep the whole.
            return whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start).clone()
        except QuantizedTensorError as error:
            raise WeightsError(f"tensor {name} in {self.path(name)}: {error}") from error

    def _how(self, name: str) -> Quantization:
        if self._quantization is None:
            try:
                self._quantization = quantization_of(read_json(self._model_dir / "config.json"))
            except UnsupportedModelError as error:
                raise WeightsError(str(error)) from error
        if self._quantization is None:
            raise WeightsError(f"tensor {name} is quantised, but config.json has no quantization_config")
        return self._quantization

    def _shard(self, part: str) -> "_Shard":
        path = _place(self._places, part, self._model_dir)
        if path not in self._open:
            self._open[path] = self.enter_context(_Shard(path))
        return self._open[path]


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

    def tensor(self, name: str, part: TensorSlice | None = None) -> torch.Tensor:
        self._check(name)
        try:
            if part is None:
                tensor = self._file.get_tensor(name)
            else:
                before = (slice(None),) * part.dim
                tensor = self._file.get_slice(name)[(*before, slice(part.start, part.stop))]
        except SafetensorError as error:
            raise WeightsError(f"tensor {name} in {self._path} can't be read: {error}") from error
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise WeightsError(f"tensor {name} is missing from {self._path}")


def _places(model_dir: Path) -> dict[str, Path]:
    """The file of each stored tensor."""
    try:
        weight_map = read_weight_map(model_dir)
    except UnsupportedModelError as error:
        raise WeightsError(str(error)) from error
    if weight_map is not None:
        return {name: model_dir / file for name, file in weight_map.items()}
    path = model_dir / SINGLE_FILE
    if not path.exists():
        raise WeightsError(f"{model_dir} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    with _Shard(path) as shard:
        return dict.fromkeys(shard.names, path)


def _place(places: Mapping[str, Path], name: str, model_dir: Path) -> Path:
    if name not in places:
        single = model_dir / SINGLE_FILE
        raise WeightsError(f"tensor {name} is missing from {single if single.exists() else model_dir / INDEX_FILE}")
    return places[name]
