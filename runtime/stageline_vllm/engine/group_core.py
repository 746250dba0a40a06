"""vLLM as what computes for an engine: its core, and how its group forms.

The stages are supervisors of vLLM nodes; when all say that they have loaded, vLLM's server answers in the pod of stage
0, which is the engine's own.
"""

from typing import Final

from stageline_api import ports
from stageline_api.failures import FailureClass
from stageline_runtime.engine.group.stage_group import StageGroup
from stageline_runtime.engine.group_core import MAX_WAITING, Computing, CoreParts, GroupCore
from stageline_runtime.guided.json_grammars import JsonGrammars
from stageline_runtime.model_facts.foreign_model import read_foreign_model
from stageline_runtime.plan_bus.messages import StepDone
from stageline_runtime.termination import RuntimeFailure
from stageline_vllm.addresses import http_host
from stageline_vllm.engine.core import VllmCore
from stageline_vllm.engine.generate_words import VllmAnswerError
from stageline_vllm.engine.generation import VllmServer
from stageline_vllm.engine.vllm_exchange import VllmUnreachableError
from stageline_vllm.server_key import server_key


def _vllm_core(parts: CoreParts) -> GroupCore:
    contract, prompts = parts.contract, parts.prompts
    grammars = JsonGrammars(parts.model_dir, parts.info.vocab_size, prompts.eos_token_ids)
    key = server_key(contract.bus_token, contract.group, contract.incarnation)
    server = VllmServer(http_host(contract.pod_ip), ports.VLLM_HTTP, key, prompts.eos_token_ids, grammars)
    core = VllmCore(
        parts.info,
        parts.metrics,
        parts.tracing,
        server,
        max_running=contract.config.max_num_seqs,
        max_waiting=MAX_WAITING,
        adapters=(adapter.name for adapter in contract.config.lora_adapters),
        group=contract.group,
        incarnation=contract.incarnation,
    )

    async def form(group: StageGroup) -> None:
        await group.form_nodes()
        core.attach(group.broadcast)

    async def warm_up() -> None:
        try:
            await core.warm_up()
        except (VllmUnreachableError, VllmAnswerError) as error:
            raise RuntimeFailure(FailureClass.INTERNAL, str(error), operation="ask vLLM for a token") from error

    return GroupCore(
        life=core,
        form=form,
        warm_up=warm_up,
        step_done=_no_plans,
        close=core.close,
        # vLLM's worker compiles a grammar for a request that goes before the one that needs it (`grammar_words`).
        stages_prepare_guides=False,
    )


def _no_plans(done: StepDone) -> None:
    raise AssertionError(f"a stage of vLLM has answered a plan: {done}")


VLLM: Final = Computing(read_foreign_model, _vllm_core, takes_longer_contexts=True, is_told_each_step=False)
