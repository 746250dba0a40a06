"""docs/model-families.md: how every family of transformers' decoders is served, made from what the code says of each.

`python -m oracles.families_page`, with tests/support on the path, writes it; a test compares the two.
"""

import re
from collections.abc import Sequence
from typing import Final

import transformers

from oracles.decoder_families import NO_CONFIG, Family, ServedBy, decoder_families
from processes.repository_files import ROOT

PAGE: Final = ROOT / "docs" / "model-families.md"
NO_PLAN: Final = "its class in transformers declares no `base_model_pp_plan`"

_HEAD: Final = """# Families of models

How the runtime serves each of the {total} families that transformers {version} generates text with: by its **own**
decoder, by Hugging Face's layers (**coverage**), or not at all, with the reason. What a family's configuration class
says by default stands for its models here: one that sets what a path can't compute is refused too
([models.md](models.md)). Many of those that are refused are served with `engine.name: vllm` ([vllm.md](vllm.md)).

A test builds a tiny model of every family that is served, cuts it into two stages and holds its greedy tokens against
Hugging Face's `generate`; another one holds every reason against the family's configuration class. This page is
generated: `make generate`.
"""


def page() -> str:
    """The whole page, Markdown."""
    families = decoder_families()
    served = [each for each in families if each.path is not ServedBy.REFUSED]
    refused = [each for each in families if each.path is ServedBy.REFUSED]
    without_plan = [each.name for each in refused if _has_no_plan(each)]
    head = _HEAD.format(total=len(families), version=transformers.__version__)
    return "\n".join(
        [
            head,
            f"## Served: {len(served)}",
            "",
            *_table(("Family", "Path"), [(f"`{each.name}`", each.path) for each in served]),
            "",
            f"## Refused: {len(refused)}",
            "",
            *_table(("Family", "Why"), [(f"`{each.name}`", each.reason) for each in refused if not _has_no_plan(each)]),
            "",
            f"Refused because {NO_PLAN}, so that nobody knows how to cut them: {_names(without_plan)}.",
            "",
            f"Left out, since its configuration class refuses its own defaults: {_names(sorted(NO_CONFIG))}.",
            "",
        ]
    )


def names_on_the_page() -> tuple[list[str], list[str]]:
    """Families that the page calls served, and those that it calls refused.

    To judge all families takes seconds, which every process of a test run would spend before its first test.
    """
    text, _, _ = PAGE.read_text(encoding="utf-8").partition("\nLeft out, ")
    served, _, refused = text.partition("\n## Refused")
    rows, _, without_plan = refused.partition(f"\nRefused because {NO_PLAN}")
    names = re.findall(r"^\| `([^`]+)` \|", rows, re.MULTILINE) + re.findall(r"`([^`]+)`", without_plan)
    return re.findall(r"^\| `([^`]+)` \|", served, re.MULTILINE), sorted(names)


def _has_no_plan(family: Family) -> bool:
    return "base_model_pp_plan" in family.reason


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
