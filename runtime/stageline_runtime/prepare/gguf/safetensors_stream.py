"""Writes a safetensors file tensor by tensor, never holding more than one chunk in memory.

The format: an unsigned 64-bit little-endian header length, a JSON header padded with spaces to 8 bytes that gives each
tensor's dtype, shape and byte range, then the data. Offsets are known beforehand, so the data is streamed.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stageline_runtime.prepare.gguf.tensors import ConvertedTensor

ALIGNMENT_BYTES = 8


def write_bfloat16_safetensors(
    path: Path, tensors: Sequence[ConvertedTensor], on_progress: Callable[[int], None]
) -> None:
    """Write `tensors` to `path`; `on_progress` gets the tensor bytes written so far.

    Raises:
        OSError: the file can't be written.
        AssertionError: a tensor delivered another number of bytes than its shape says.
    """
    written = 0
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            start = written
            for chunk in tensor.chunks():
                file.write(chunk)
                written += len(chunk)
                on_progress(written)
            assert written - start == tensor.num_bytes, f"{tensor.name}: {written - start} of {tensor.num_bytes} bytes"


def _header(tensors: Sequence[ConvertedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
