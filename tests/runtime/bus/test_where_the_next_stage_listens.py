"""The engine tells each process of a group where the same rank of the next stage listens; nobody is led elsewhere."""

from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from oracles.tiny_models import write_tiny_llama
from processes.played_stage import challenged, heard, hello, played_stage, proven
from processes.running_group import running_group
from stageline_runtime.plan_bus.bus import encode_frame
from stageline_runtime.plan_bus.messages import LinkAddress, Place, Welcome

STAGES, RANKS = 3, 2


def address(place: Place) -> LinkAddress:
    return LinkAddress(f"10.0.0.{place.stage}", 2000 + place.rank)


def test_each_rank_is_told_where_the_same_rank_of_the_next_stage_listens(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path / "model")
    held_back = frozenset(f"stage-{stage}" for stage in range(STAGES))
    places = [Place(stage, rank) for stage in range(STAGES) for rank in range(RANKS)]
    with (
        running_group(tmp_path, model_dir, STAGES, start=False, held_back=held_back, tensor=RANKS) as group,
        ExitStack() as stack,
    ):
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        played = {}
        for place in places:
            said = hello(
                stage=place.stage, stage_count=STAGES, rank=place.rank, ranks=RANKS, link_address=address(place)
            )
            played[place] = stack.enter_context(played_stage(group, said))
        for place, each in played.items():
            welcome = each.hear()
            assert isinstance(welcome, Welcome), welcome
            assert welcome.next_address == address(Place((place.stage + 1) % STAGES, place.rank)), place


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_there_is_not_is_refused_with_the_field(tmp_path: Path, port: int) -> None:
    model_dir = write_tiny_llama(tmp_path / "model")
    held_back = frozenset({"stage-0", "stage-1"})
    with running_group(tmp_path, model_dir, 2, start=False, held_back=held_back) as group:
        group.wait_until(lambda: group.engine_status().get("phase") == "Connecting", "the engine listens")
        with challenged(group) as (connection, nonce):
            said = msgspec.structs.replace(hello(), link_address=LinkAddress("127.0.0.1", port))
            connection.sendall(encode_frame(proven(said, group.token, nonce)))
            assert heard(connection) == []
        group.wait_until(lambda: "refused a connection to the plan bus" in group.log("engine"), "it says why")
        assert "Expected `int`" in group.log("engine"), group.log("engine")
        assert group.engine_status()["stages_connected"] == 0
