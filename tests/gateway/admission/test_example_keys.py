"""The example of API keys is a file that the gateway reads."""

from processes.repository_files import ROOT
from stageline_gateway.admission.keys_file import KeysFile


def test_the_gateway_reads_the_example_of_keys() -> None:
    keys = KeysFile(ROOT / "examples" / "gateway" / "keys.yaml")
    assert keys.problem == ""
    assert len(keys.ring.callers) == 2
