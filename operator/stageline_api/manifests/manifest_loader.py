"""Loads manifest files to PipelineModels, or to all problems in them: an invalid file applies nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stageline_api.errors import USAGE_EXIT_CODE, UserError
from stageline_api.manifests.strict_yaml import UnreadableYamlError, read_documents
from stageline_api.manifests.validation_problems import problems_of
from stageline_api.resource.field_problem import FieldProblem, show_value
from stageline_api.resource.pipeline_model import API_VERSION, KIND, PipelineModel


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Contents of a file. `models` is complete only if there are no problems."""

    models: tuple[PipelineModel, ...]
    problems: tuple[FieldProblem, ...]
    documents: tuple[int | None, ...] = ()
    """For each model, the number of its document in the file, from one; None if the file has one document."""


def load_manifests(path: Path) -> LoadResult:
    """Read one file of one or more PipelineModels. Never raises for the file's contents."""
    file = str(path)
    try:
        documents = read_documents(path)
    except UnreadableYamlError as problem:
        return LoadResult((), (FieldProblem(path="", rule=str(problem), file=file),))
    if not documents:
        return LoadResult((), (FieldProblem(path="", rule="holds no PipelineModel", file=file),))
    models: list[PipelineModel] = []
    problems: list[FieldProblem] = []
    numbers: list[int | None] = []
    first_document: dict[tuple[str, str], int] = {}
    for number, document in documents:
        shown_number = number if len(documents) > 1 else None
        parsed = parse_manifest(document)
        if isinstance(parsed, PipelineModel):
            earlier = first_document.setdefault((parsed.namespace, parsed.name), number)
            if earlier == number:
                models.append(parsed)
                numbers.append(shown_number)
                continue
            parsed = [_same_name(parsed, earlier)]
        problems.extend(problem.placed(file, shown_number) for problem in parsed)
    return LoadResult(tuple(models), tuple(problems), tuple(numbers))


def parse_manifest(document: Any, *, ignores_unknown: bool = False) -> PipelineModel | list[FieldProblem]:
    """One document as a PipelineModel, or all problems in it (never an empty list).

    `ignores_unknown` is for manifests that an API server has accepted: unknown fields belong to a newer version.
    """
    if not isinstance(document, dict):
        rule = f"must be a mapping with apiVersion, kind, metadata and spec, not {show_value(document)}"
        return [FieldProblem(path="", rule=rule)]
    wrong_kind = [
        FieldProblem(path=field, value=show_value(document[field]), rule=f'must be "{wanted}"')
        if field in document
        else FieldProblem(path=field, rule=f'is required: "{wanted}"')
        for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND))
        if document.get(field) != wanted
    ]
    if wrong_kind:
        return wrong_kind  # its other fields follow other rules
    try:
        return (PipelineModel.read_accepted if ignores_unknown else PipelineModel.model_validate)(document)
    except ValidationError as error:
        return problems_of(error, PipelineModel)


def load_one_model(path: Path) -> PipelineModel:
    """The PipelineModel of a file with exactly one. Raises `UserError` with one line for each problem."""
    result = load_manifests(path)
    refuse(result.problems)
    if len(result.models) != 1:
        names = ", ".join(model.name for model in result.models)
        raise UserError(
            f"{path}: must hold exactly one PipelineModel, not {len(result.models)} ({names})", USAGE_EXIT_CODE
        )
    return result.models[0]


def refuse(problems: Sequence[FieldProblem]) -> None:
    """Raise UserError with exit status 2 and one line for each problem; return if there is none."""
    if problems:
        raise UserError("\n".join(str(problem) for problem in problems), USAGE_EXIT_CODE)


def _same_name(model: PipelineModel, earlier: int) -> FieldProblem:
    rule = f"document {earlier} has the same name in namespace {model.namespace}"
    return FieldProblem(path="metadata.name", value=show_value(model.name), rule=rule)
