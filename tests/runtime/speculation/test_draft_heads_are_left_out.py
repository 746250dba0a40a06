"""docs/speculation.md says that no draft head is built, because transformers runs none for a family that is served."""

from transformers import CONFIG_MAPPING

from oracles.decoder_families import ServedBy, decoder_families
from processes.repository_files import ROOT


def has_draft_head(name: str) -> bool:
    """Whether `transformers`' `MtpModel` can be made for it: the family's config says how many layers drafts have."""
    config = CONFIG_MAPPING[name]
    return "num_mtp_layers" in config.attribute_map or hasattr(config, "num_mtp_layers")


def test_families_with_a_draft_head_are_those_of_the_page_and_none_is_served() -> None:
    """One day one is: then a head can be built, and held against Hugging Face's drafts."""
    families = [family for family in decoder_families() if has_draft_head(family.name)]
    assert families
    assert [family.name for family in families if family.path is not ServedBy.REFUSED] == []
    page = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    assert [family.name for family in families if f"`{family.name}`" not in page] == []
