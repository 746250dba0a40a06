"""Every way a manifest can be wrong, and the exact line a person reads."""

from pathlib import Path

import pytest

from stageline_api.manifests.manifest_loader import load_manifests

HEAD = "apiVersion: stageline.dev/v1alpha1\nkind: PipelineModel\nmetadata: {name: m}\n"
MODEL = "  model: {source: 'hf://org/name'}\n"


def _lines(tmp_path: Path, content: str | bytes) -> list[str]:
    file = tmp_path / "m.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    loaded = load_manifests(file)
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in loaded.problems]


SPEC_CASES = {
    "pipeline-zero": ("parallelism: {pipeline: 0}", "spec.parallelism.pipeline: 0 is not allowed: must be at least 1"),
    "pipeline-large": (
        "parallelism: {pipeline: 65}",
        "spec.parallelism.pipeline: 65 is not allowed: must be at most 64",
    ),
    "gang-unknown": (
        "placement: {gang: {scheduler: slurm}}",
        'spec.placement.gang.scheduler: "slurm" is not allowed: '
        'must be one of "volcano", "kai", "kueue" or "kubernetes"',
    ),
    "gang-without-a-queue": (
        "placement: {gang: {scheduler: kueue}}",
        "spec.placement.gang.queue: is required with scheduler kueue or kai, which have no default queue",
    ),
    "gang-with-a-queue-that-nobody-has": (
        "placement: {gang: {scheduler: kubernetes, queue: mine}}",
        "spec.placement.gang.queue: is not for scheduler kubernetes, which has no queues: leave it out",
    ),
    "gang-and-its-reference-by-hand": (
        "placement: {gang: {scheduler: kubernetes}}\n"
        "  template: {podTemplate: {spec: {schedulingGroup: {podGroupName: mine}}}}",
        "spec.template.podTemplate.spec.schedulingGroup: is set by placement.gang: leave it out, or placement.gang",
    ),
    "gang-and-another-scheduler": (
        "placement: {gang: {scheduler: volcano}}\n  template: {schedulerName: mine}",
        'spec.template.schedulerName: "mine" is not allowed: is decided by placement.gang.scheduler: leave it out',
    ),
    "gang-and-its-annotation-by-hand": (
        "placement: {gang: {scheduler: volcano}}\n  template: {annotations: {pod-group-name: mine}}",
        'spec.template.annotations[pod-group-name]: "mine" is not allowed: '
        "is set by placement.gang: leave it out, or placement.gang",
    ),
    "number-in-quotes": (
        'parallelism: {pipeline: "2"}',
        'spec.parallelism.pipeline: "2" is not allowed: must be an integer',
    ),
    "true-for-number": ("replicas: true", "spec.replicas: true is not allowed: must be an integer"),
    "float-for-number": ("replicas: 1.0", "spec.replicas: 1.0 is not allowed: must be an integer"),
    "nan-for-number": ("replicas: .nan", "spec.replicas: NaN is not allowed: must be an integer"),
    "null": ("stages:", "spec.stages: null is not allowed: leave the field out to get its default"),
    "scalar-for-mapping": ("engine: fast", 'spec.engine: "fast" is not allowed: must be a mapping of fields'),
    "mapping-for-list": ("stages: {a: 1}", 'spec.stages: {"a": 1} is not allowed: must be a list'),
    "number-for-string": (
        "network: {interface: 0}",
        "spec.network.interface: 0 is not allowed: must be a string; put it in quotes",
    ),
    "tensor-above-8": (
        "parallelism: {tensor: 9}",
        "spec.parallelism.tensor: 9 is not allowed: must be at most 8",
    ),
    "graphs-of-ranks": (
        "engine: {graphs: piecewise}\n  parallelism: {tensor: 2}",
        'spec.engine.graphs: "piecewise" is not allowed: '
        "can't be had where parallelism.tensor or parallelism.expert is above 1, whose exchanges are not captured: "
        "auto or off",
    ),
    "graphs-of-ranks-of-experts": (
        "engine: {graphs: full}\n  parallelism: {expert: 2}",
        'spec.engine.graphs: "full" is not allowed: '
        "can't be had where parallelism.tensor or parallelism.expert is above 1, whose exchanges are not captured: "
        "auto or off",
    ),
    "expert-above-8": (
        "parallelism: {expert: 9}",
        "spec.parallelism.expert: 9 is not allowed: must be at most 8",
    ),
    "expert-and-tensor": (
        "parallelism: {expert: 2, tensor: 2}",
        "spec.parallelism.expert: 2 is not allowed: "
        "can't be above 1 where parallelism.tensor is: ranks share each layer, or its experts alone",
    ),
    "expert-under-vllm": (
        "engine: {name: vllm}\n  parallelism: {expert: 2}",
        "spec.parallelism.expert: 2 is not allowed: is only for engine.name: stageline: vllm divides experts among the "
        "devices of parallelism.tensor, with --enable-expert-parallel in engine.extraArgs",
    ),
    "engine-unknown": (
        "engine: {name: sglang}",
        'spec.engine.name: "sglang" is not allowed: must be one of "stageline" or "vllm"',
    ),
    "vllm-image-elsewhere": (
        "engine: {image: vllm/vllm-openai}",
        "spec.engine.image: is only for engine.name: vllm",
    ),
    "vllm-arguments-elsewhere": (
        "engine: {extraArgs: [--enforce-eager]}",
        "spec.engine.extraArgs: is only for engine.name: vllm",
    ),
    "vllm-owned-argument": (
        "engine: {name: vllm, extraArgs: [--quantization, fp8, --nnodes=3]}",
        'spec.engine.extraArgs[2]: "--nnodes=3" is not allowed: '
        "--nnodes is set by the operator: it follows from the group's pods",
    ),
    "vllm-owned-argument-in-the-other-spelling": (
        "engine: {name: vllm, extraArgs: [--max_model_len, '9']}",
        'spec.engine.extraArgs[0]: "--max_model_len" is not allowed: --max-model-len is spec.engine.maxModelLen',
    ),
    "vllm-owned-argument-shortened": (
        "engine: {name: vllm, extraArgs: [--scheduler-c, mine.Scheduler]}",
        'spec.engine.extraArgs[0]: "--scheduler-c" is not allowed: vLLM may read it as --scheduler-cls, which '
        "is set by the operator, to keep the microbatches even: write the argument's whole name",
    ),
    "vllm-owned-argument-of-one-letter": (
        "engine: {name: vllm, extraArgs: ['-pp=2']}",
        'spec.engine.extraArgs[0]: "-pp=2" is not allowed: -pp stands for --pipeline-parallel-size, '
        "which is spec.parallelism.pipeline",
    ),
    "vllm-owned-variable-of-the-network": (
        "engine: {name: vllm}\n  network: {env: [{name: NCCL_DEBUG, value: INFO}, {name: VLLM_HOST_IP, value: '1'}]}",
        'spec.network.env[1].name: "VLLM_HOST_IP" is not allowed: VLLM_HOST_IP is set by the operator: '
        "it follows from the group's pods",
    ),
    "vllm-silent": (
        "engine: {name: vllm}\n  template: {env: [{name: VLLM_LOGGING_LEVEL, value: CRITICAL}]}",
        'spec.template.env[0].name: "VLLM_LOGGING_LEVEL" is not allowed: VLLM_LOGGING_LEVEL must be DEBUG, INFO, '
        "WARNING or ERROR: a failure's cause is read from vLLM's log",
    ),
    "vllm-speculation": (
        "engine: {name: vllm, extraArgs: ['--speculative-config.method', ngram]}",
        'spec.engine.extraArgs[0]: "--speculative-config.method" is not allowed: --speculative-config is refused: '
        "with a pipeline vLLM's speculation and continued answers exclude each other",
    ),
    "vllm-graphs": (
        "engine: {name: vllm, graphs: full}",
        'spec.engine.graphs: "full" is not allowed: has no meaning under vllm, which captures by its own rules: '
        "see extraArgs --compilation-config",
    ),
    "vllm-device": (
        "engine: {name: vllm, device: cuda}",
        'spec.engine.device: "cuda" is not allowed: '
        "has no meaning under vllm, whose image is made for one kind of device",
    ),
    "adapter-twice": (
        "engine: {name: vllm, loraAdapters: [{name: a, path: /a}, {name: a, path: /b}]}",
        'spec.engine.loraAdapters[1].name: "a" is not allowed: is given twice: each adapter has a name of its own',
    ),
    "adapter-path": (
        "engine: {name: vllm, loraAdapters: [{name: a, path: ../a}]}",
        'spec.engine.loraAdapters[0].path: "../a" is not allowed: must be an absolute path without ".."',
    ),
    "dtype": (
        "engine: {dtype: float64}",
        'spec.engine.dtype: "float64" is not allowed: must be one of "auto", "float32", "bfloat16" or "float16"',
    ),
    "unknown-with-neighbour": (
        "engine: {maxModelLength: 9}",
        'spec.engine.maxModelLength: unknown field; did you mean "maxModelLen"?',
    ),
    "snake-case": ("engine: {max_num_seqs: 9}", 'spec.engine.max_num_seqs: unknown field; did you mean "maxNumSeqs"?'),
    "unknown": ("network: {mtu: 9}",
                "spec.network.mtu: unknown field; the fields here are interface, rdmaResource, tls, env"),
    "unknown-in-list": (
        "stages: [{layer: 0-3}]",
        'spec.stages[0].layer: unknown field; did you mean "layers"?',
    ),
    "not-built-field": ("engine: {lora: true}", "spec.engine.lora: unknown field; the fields here are "
                        "name, image, extraArgs, loraAdapters, dtype, maxModelLen, maxNumSeqs, maxNumBatchedTokens, "
                        "prefixCache, generationConfig, graphs, device, speculative, seed"),
    "speculation-without-a-method": (
        "engine: {speculative: {tokens: 4}}",
        "spec.engine.speculative.method: is required",
    ),
    "an-unknown-way-to-draft": (
        "engine: {speculative: {method: eagle}}",
        'spec.engine.speculative.method: "eagle" is not allowed: must be one of "lookup" or "draft"',
    ),
    "drafts-without-their-model": (
        "engine: {speculative: {method: draft}}",
        "spec.engine.speculative.draft: is required by method draft: it names the model that drafts",
    ),
    "a-draft-model-for-lookup": (
        "engine: {speculative: {method: lookup, draft: {source: 'hf://org/small'}}}",
        "spec.engine.speculative.draft: is only for method draft",
    ),
    "a-draft-model-without-a-source": (
        "engine: {speculative: {method: draft, draft: {}}}",
        "spec.engine.speculative.draft.source: is required",
    ),
    "a-draft-model-on-a-claim": (
        "engine: {speculative: {method: draft, draft: {source: 'pvc://models/small'}}}",
        'spec.engine.speculative.draft.source: "pvc://models/small" is not allowed: must be file:///dir, '
        "hf://org/name[@revision] or pypi://distribution==version/file.gguf; a directory of a volume of "
        "template.volumes is a file:// source",
    ),
    "too-many-drafts": (
        "engine: {speculative: {method: lookup, tokens: 17}}",
        "spec.engine.speculative.tokens: 17 is not allowed: must be at most 16",
    ),
    "matches-nothing": (
        "engine: {speculative: {method: lookup, minMatch: 0}}",
        "spec.engine.speculative.minMatch: 0 is not allowed: must be at least 1",
    ),
    "too-many-recent-answers": (
        "engine: {speculative: {method: lookup, recentAnswers: 65}}",
        "spec.engine.speculative.recentAnswers: 65 is not allowed: must be at most 64",
    ),
    "a-shortest-match-for-a-draft-model": (
        "engine: {speculative: {method: draft, draft: {source: 'hf://org/small'}, minMatch: 2}}",
        "spec.engine.speculative.minMatch: is only for method lookup",
    ),
    "recent-answers-for-a-draft-model": (
        "engine: {speculative: {method: draft, draft: {source: 'hf://org/small'}, recentAnswers: 4}}",
        "spec.engine.speculative.recentAnswers: is only for method lookup",
    ),
    "speculation-under-vllm": (
        "engine: {name: vllm, speculative: {method: lookup}}",
        "spec.engine.speculative: is refused under vllm: with a pipeline its speculation and continued answers exclude "
        "each other",
    ),
    "draft-model-beside-ranks-on-devices": (
        "engine: {device: cuda, speculative: {method: draft, draft: {source: file:///m}}}\n"
        "  parallelism: {tensor: 2}",
        "spec.engine.speculative: with method draft is not supported for ranks on devices: use lookup, set "
        "parallelism.tensor and parallelism.expert to 1, or engine.device to cpu",
    ),
    "stage-count": (
        "parallelism: {pipeline: 3}\n  stages: [{}, {}]",
        "spec.stages: has 2 entries but parallelism.pipeline is 3: give one entry for each stage",
    ),
    "layers-missing-on-one": (
        "parallelism: {pipeline: 2}\n  stages: [{layers: 0-3}, {}]",
        "spec.stages[1].layers: is missing: when one stage gives layers, every stage must",
    ),
    "layers-start": (
        "stages: [{layers: 2-3}]",
        'spec.stages[0].layers: "2-3" is not allowed: layers 0 to 1 are missing: the first stage must start at layer 0',
    ),
    "layers-gap": (
        "parallelism: {pipeline: 2}\n  stages: [{layers: 0-3}, {layers: 5-8}]",
        'spec.stages[1].layers: "5-8" is not allowed: layer 4 is missing: must start at layer 4, right after stages[0]',
    ),
    "layers-overlap": (
        "parallelism: {pipeline: 2}\n  stages: [{layers: 0-3}, {layers: 3-8}]",
        'spec.stages[1].layers: "3-8" is not allowed: overlaps stages[0], which ends at layer 3: must start at layer 4',
    ),
    "layers-reversed": (
        "stages: [{layers: 8-0}]",
        'spec.stages[0].layers: "8-0" is not allowed: the first layer must not be above the last: write 0-8',
    ),
    "layers-no-range": (
        "stages: [{layers: all}]",
        'spec.stages[0].layers: "all" is not allowed: '
        'must be a range of layers, first-last with both ends included, as in "0-14"',
    ),
    "reserved-env": (
        "template: {env: [{name: RANK, value: '1'}]}",
        'spec.template.env[0].name: "RANK" is not allowed: is set by Stageline itself',
    ),
    "env-value-and-its-source": (
        "template: {env: [{name: A, value: b, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]}",
        "spec.template.env[0].valueFrom: give value or valueFrom, not both",
    ),
    "env-two-sources": (
        "template: {env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.nodeName}, "
        "secretKeyRef: {name: s, key: k}}}]}",
        "spec.template.env[0].valueFrom: give exactly one of secretKeyRef, configMapKeyRef, fieldRef and "
        "resourceFieldRef",
    ),
    "vllm-path-from-elsewhere": (
        "engine: {name: vllm}\n"
        "  template: {env: [{name: PYTHONPATH, valueFrom: {configMapKeyRef: {name: c, key: k}}}]}",
        'spec.template.env[0].name: "PYTHONPATH" is not allowed: PYTHONPATH must be a value in template.env: '
        "Stageline prepends its own entry",
    ),
    "overlay-of-a-probe": (
        "template: {podTemplate: {spec: {containers: [{name: stage, startupProbe: {}}]}}}",
        "spec.template.podTemplate.spec.containers[0].startupProbe: "
        "belongs to Stageline, because the group depends on it",
    ),
    "env-value-is-never-shown": (
        "template: {env: [{name: A, value: 31415926}]}",
        "spec.template.env[0].value: must be a string; put it in quotes",
    ),
    "quantity": (
        "template: {resources: {limits: {memory: lots}}}",
        'spec.template.resources.limits.memory: "lots" is not allowed: must be a quantity such as 2, "500m" or "8Gi"',
    ),
    "gpus-of-another-number-than-ranks": (
        "engine: {device: cuda}\n  template: {resources: {limits: {nvidia.com/gpu: 2}}}",
        'spec.template.resources.limits[nvidia.com/gpu]: 2 is not allowed: '
        "must be 1 with engine.device cuda: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "gpus-of-another-number-than-ranks-of-layers": (
        "engine: {device: cuda}\n  parallelism: {tensor: 4}\n  template: {resources: {limits: {nvidia.com/gpu: 2}}}",
        "spec.template.resources.limits[nvidia.com/gpu]: 2 is not allowed: "
        "must be 4 with engine.device cuda: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "gpus-of-another-number-than-ranks-of-experts": (
        "engine: {device: cuda}\n  parallelism: {expert: 2}\n  template: {resources: {limits: {nvidia.com/gpu: 1}}}",
        "spec.template.resources.limits[nvidia.com/gpu]: 1 is not allowed: "
        "must be 2 with engine.device cuda: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "gpus-of-another-number-than-ranks-that-would-find-them": (
        "parallelism: {expert: 2}\n  stages: [{resources: {limits: {nvidia.com/gpu: '3'}}}]",
        "spec.stages[0].resources.limits[nvidia.com/gpu]: 3 is not allowed: "
        "must be 2 with engine.device auto: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "graphs-of-ranks-on-devices": (
        "engine: {device: cuda, graphs: full}\n  parallelism: {tensor: 2}",
        'spec.engine.graphs: "full" is not allowed: can\'t be had where parallelism.tensor or parallelism.expert is '
        "above 1, whose exchanges are not captured: auto or off",
    ),
    "a-stage-without-a-gpu": (
        "engine: {device: cuda}\n  stages: [{resources: {limits: {nvidia.com/gpu: '0'}}}]",
        'spec.stages[0].resources.limits[nvidia.com/gpu]: 0 is not allowed: '
        "must be 1 with engine.device cuda: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "gpus-of-another-number-than-vllms-rank": (
        "engine: {name: vllm}\n  template: {resources: {limits: {nvidia.com/gpu: 2}}}",
        "spec.template.resources.limits[nvidia.com/gpu]: 2 is not allowed: "
        "must be 1 with engine.name vllm on GPUs: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "gpus-of-another-number-than-vllms-ranks": (
        "engine: {name: vllm}\n  parallelism: {tensor: 4}\n  stages: [{resources: {limits: {nvidia.com/gpu: 2}}}]",
        "spec.stages[0].resources.limits[nvidia.com/gpu]: 2 is not allowed: "
        "must be 4 with engine.name vllm on GPUs: one for each rank of a stage (parallelism.tensor or expert)",
    ),
    "vllm-owned-variable": (
        "engine: {name: vllm}\n  template: {env: [{name: HF_HOME, value: /x}, {name: VLLM_API_KEY, value: k}]}",
        'spec.template.env[1].name: "VLLM_API_KEY" is not allowed: VLLM_API_KEY belongs to vLLM\'s HTTP server, '
        "which answers the group's own engine only: set it at the gateway",
    ),
    "grace-shorter-than-drain": (
        "template: {terminationGracePeriodSeconds: 5}",
        "spec.template.terminationGracePeriodSeconds: 5 is not allowed: "
        "must be at least timeouts.drainSeconds, which is 30",
    ),
    "step-smaller-than-batch": (
        "engine: {maxNumSeqs: 9, maxNumBatchedTokens: 8}",
        "spec.engine.maxNumBatchedTokens: 8 is not allowed: "
        "must be at least engine.maxNumSeqs, which is 9: each request takes a token of a step",
    ),
    "autoscaling-without-a-most": ("autoscaling: {minReplicas: 2}", "spec.autoscaling.maxReplicas: is required"),
    "autoscaling-to-zero": (
        "autoscaling: {minReplicas: 0, maxReplicas: 2}",
        "spec.autoscaling.minReplicas: 0 is not allowed: must be at least 1",
    ),
    "autoscaling-out-of-order": (
        "autoscaling: {minReplicas: 3, maxReplicas: 2}",
        "spec.autoscaling.maxReplicas: must be at least minReplicas, which is 3",
    ),
    "rollout-that-can-not-move": (
        "rollout: {maxSurge: 0}",
        "spec.rollout.maxUnavailable: must be at least 1 when rollout.maxSurge is 0, or no group could ever be "
        "replaced",
    ),
    "reserved-label": (
        "template: {labels: {stageline.dev/stage: '1'}}",
        'spec.template.labels: {"stageline.dev/stage": "1"} is not allowed: '
        "stageline.dev/ and app.kubernetes.io/ keys are set by Stageline itself",
    ),
    "unknown-placeholder": (
        "template: {labels: {a.dev/b: $(NODE)}}",
        'spec.template.labels["a.dev/b"]: "$(NODE)" is not allowed: must be a label value: letters, digits, '
        "'-', '_' and '.', with a letter or digit at both ends, or $(MODEL), $(GROUP), $(INCARNATION), $(STAGE), "
        "$(STAGES)",
    ),
    "pull-secret-name": (
        "template: {imagePullSecrets: [{name: My_Secret}]}",
        'spec.template.imagePullSecrets[0].name: "My_Secret" is not allowed: must be the name of a Kubernetes object: '
        'lower-case letters, digits, "." and "-"',
    ),
    "pull-secret-twice": (
        "template: {imagePullSecrets: [{name: a}, {name: b}, {name: a}]}",
        'spec.template.imagePullSecrets: [{"name": "a"}, {"name": "b"}, {"name": "a"}] is not allowed: '
        "a given more than once",
    ),
    "volume-without-a-source": (
        "template: {volumes: [{name: a, mountPath: /a}]}",
        "spec.template.volumes[0]: give exactly one of claimName, hostPath, configMapName, secretName and "
        "emptyDirSizeLimit",
    ),
    "volume-over-stagelines-own": (
        "template: {volumes: [{name: a, mountPath: /tmp/a, claimName: a}]}",
        'spec.template.volumes[0].mountPath: "/tmp/a" is not allowed: must not be within /etc/stageline, '
        "/var/cache/stageline, /var/cache/stageline-compiled, /var/lib/stageline, /opt/stageline-vllm, /dev/shm, /tmp, "
        "which Stageline itself mounts",
    ),
    "volume-names": (
        "template: {volumes: [{name: cache, mountPath: /a, claimName: a}]}",
        'spec.template.volumes[0].name: "cache" is not allowed: is the name of a volume that Stageline itself makes',
    ),
    "root-by-accident": (
        "template: {securityContext: {runAsUser: 0}}",
        "spec.template.securityContext.runAsUser: 0 is root: set runAsNonRoot to false as well",
    ),
    "spread": (
        "placement: {spread: Always}",
        'spec.placement.spread: "Always" is not allowed: must be one of "Required", "Preferred" or "None"',
    ),
    "rdma": (
        "network: {rdmaResource: hca}",
        'spec.network.rdmaResource: "hca" is not allowed: must be the name of an extended resource, such as rdma/hca',
    ),
    "TLS without a Secret": (
        "network: {tls: {}}",
        "spec.network.tls.secretName: is required",
    ),
    "TLS with a name that no Secret has": (
        "network: {tls: {secretName: Certs}}",
        'spec.network.tls.secretName: "Certs" is not allowed: '
        'must be the name of a Kubernetes object: lower-case letters, digits, "." and "-"',
    ),
    "TLS between nodes of vLLM": (
        "engine: {name: vllm}\n  network: {tls: {secretName: certs}}",
        "spec.network.tls: is for engine.name stageline only: the traffic between vLLM nodes has no TLS",
    ),
    "TLS between ranks": (
        "parallelism: {tensor: 2}\n  network: {tls: {secretName: certs}}",
        "spec.network.tls: is for stages of one rank only: parallelism.tensor and parallelism.expert must be 1",
    ),
    "TLS between ranks that divide experts": (
        "parallelism: {expert: 2}\n  network: {tls: {secretName: certs}}",
        "spec.network.tls: is for stages of one rank only: parallelism.tensor and parallelism.expert must be 1",
    ),
    "TLS on another interface": (
        "network: {interface: eth1, tls: {secretName: certs}}",
        'spec.network.interface: "eth1" is not allowed: '
        "can't be used with network.tls, whose connections use the pods' own addresses: leave it out",
    ),
    "TLS over RDMA": (
        "network: {rdmaResource: rdma/hca, tls: {secretName: certs}}",
        'spec.network.rdmaResource: "rdma/hca" is not allowed: '
        "can't be used with network.tls: RDMA has no TLS, so it would stay unused",
    ),
    "interface": (
        "network: {interface: 'a b'}",
        'spec.network.interface: "a b" is not allowed: '
        "must be the name of a network interface, at most 15 characters",
    ),
}  # fmt: skip

MODEL_CASES = {
    "no-source": ("{}", "spec.model.source: is required"),
    "unknown-scheme": (
        "{source: 's3://bucket/dir'}",
        'spec.model.source: "s3://bucket/dir" is not allowed: '
        "unknown scheme s3://; use file://, hf://, pypi://, pvc:// or oci://",
    ),
    "pvc-dots": (
        "{source: 'pvc://claim/../dir'}",
        'spec.model.source: "pvc://claim/../dir" is not allowed: '
        "pvc:// needs a claim and a directory without dots in front, as in pvc://models/smollm2",
    ),
    "two-revisions": (
        "{source: 'hf://org/name@a', revision: b}",
        "spec.model.revision: is only allowed with an hf:// source that has no @revision of its own",
    ),
    "two-caches": (
        "{source: 'file:///m', cache: {hostPath: /c, claimName: c}}",
        "spec.model.cache.claimName: is not allowed together with hostPath: a cache is in one place",
    ),
    "claim-and-claims-of-its-own": (
        "{source: 'file:///m', cache: {claimName: c, claimTemplate: {size: 1Gi}}}",
        "spec.model.cache.claimTemplate: is not allowed together with hostPath, claimName or sizeLimit: "
        "a cache is in one place",
    ),
    "source-number": ("{source: 7}", "spec.model.source: 7 is not allowed: must be a string; put it in quotes"),
    "pypi-no-version": (
        "{source: 'pypi://llm/x.gguf'}",
        'spec.model.source: "pypi://llm/x.gguf" is not allowed: '
        "pypi:// needs an exact version, as in pypi://distribution==1.2.3/model.gguf",
    ),
    "token-without-hub": (
        "{source: 'file:///m', tokenSecretRef: {name: t}}",
        "spec.model.tokenSecretRef: is only allowed with an hf:// source",
    ),
    "relative-cache": (
        "{source: 'file:///m', cache: {hostPath: var/cache}}",
        'spec.model.cache.hostPath: "var/cache" is not allowed: must be an absolute path without ".."',
    ),
    "empty-served-name": (
        "{source: 'file:///m', servedName: ''}",
        'spec.model.servedName: "" is not allowed: must not be empty',
    ),
}

FILE_CASES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "m.yaml: holds no PipelineModel"),
    "only-comments": ("# nothing\n---\n---\n", "m.yaml: holds no PipelineModel"),
    "a-list": ("- 1\n", "m.yaml: must be a mapping with apiVersion, kind, metadata and spec, not [1]"),
    "other-kind": (
        "apiVersion: stageline.dev/v1alpha1\nkind: Deployment\n",
        'm.yaml: kind: "Deployment" is not allowed: must be "PipelineModel"',
    ),
    "no-kind": ("apiVersion: stageline.dev/v1alpha1\n", 'm.yaml: kind: is required: "PipelineModel"'),
    "syntax": (
        "a: [1\nb: 2\n",
        "m.yaml: line 2, column 2: is not valid YAML: expected ',' or ']', but got ':' while parsing a flow sequence",
    ),
    "tab": (
        "a:\n\t- 1\n",
        r"m.yaml: line 2, column 1: is not valid YAML: found character '\t' that cannot start any token "
        "while scanning for the next token",
    ),
    "duplicate-key": ("a: 1\nb: 2\na: 3\n", 'm.yaml: line 3, column 1: the key "a" is given twice in one mapping'),
    "key-not-string": ("on: 1\n", "m.yaml: line 1, column 1: a key must be a string; put it in quotes"),
    "python-tag": (
        "a: !!python/object/apply:os.getpid []\n",
        'm.yaml: line 1, column 4: the tag "tag:yaml.org,2002:python/object/apply:os.getpid" is not allowed',
    ),
    "loop": ("a: &x\n  b: *x\n", "m.yaml: line 1, column 4: an alias contains itself"),
    "not-utf8": (b"a: 1\nb: \xff\n", "m.yaml: line 2: is not UTF-8 text"),
    "nul": ("a: \0\n", "m.yaml: holds the character U+0000, which YAML does not allow"),
    "too-large": ("#" * 300_000, "m.yaml: is larger than 262144 bytes, too large for a PipelineModel"),
    "too-deep": ("a: " + "[" * 20_000, "m.yaml: is nested too deeply"),
    "long-name": (
        "apiVersion: stageline.dev/v1alpha1\nkind: PipelineModel\nmetadata: {name: " + "a" * 41 + "}\nspec:\n" + MODEL,
        f'm.yaml: metadata.name: "{"a" * 41}" is not allowed: must be at most 40 characters, because pod names add '
        "group, incarnation and stage to it and Kubernetes ends at 63",
    ),
    "same-name": (
        f"{HEAD}spec:\n{MODEL}---\n---\n{HEAD}spec:\n{MODEL}",
        'm.yaml: document 3: metadata.name: "m" is not allowed: document 1 has the same name in namespace default',
    ),
}


@pytest.mark.parametrize(("fragment", "line"), SPEC_CASES.values(), ids=SPEC_CASES.keys())
def test_a_bad_spec_field_gets_one_line_with_its_path_value_and_rule(tmp_path: Path, fragment: str, line: str) -> None:
    assert _lines(tmp_path, f"{HEAD}spec:\n{MODEL}  {fragment}\n") == [f"m.yaml: {line}"]


@pytest.mark.parametrize(("model", "line"), MODEL_CASES.values(), ids=MODEL_CASES.keys())
def test_a_bad_model_gets_one_line(tmp_path: Path, model: str, line: str) -> None:
    assert _lines(tmp_path, f"{HEAD}spec:\n  model: {model}\n") == [f"m.yaml: {line}"]


@pytest.mark.parametrize(("content", "line"), FILE_CASES.values(), ids=FILE_CASES.keys())
def test_a_file_that_is_no_manifest_gets_one_line(tmp_path: Path, content: str | bytes, line: str) -> None:
    assert _lines(tmp_path, content) == [line]


def test_every_problem_of_a_file_is_reported_with_its_document(tmp_path: Path) -> None:
    lines = _lines(tmp_path, f"{HEAD}spec:\n{MODEL}  replicas: -1\n  seed: 1\n---\nkind: 3\n")
    assert lines == [
        "m.yaml: document 1: spec.replicas: -1 is not allowed: must be at least 0",
        "m.yaml: document 1: spec.seed: unknown field; the fields here are "
        "model, engine, parallelism, stages, template, placement, network, replicas, autoscaling, suspend, rollout, "
        "restart, timeouts",
        'm.yaml: document 2: apiVersion: is required: "stageline.dev/v1alpha1"',
        'm.yaml: document 2: kind: 3 is not allowed: must be "PipelineModel"',
    ]


def test_an_alias_bomb_is_refused_without_being_expanded(tmp_path: Path) -> None:
    levels = ["l0: &l0 [a, a, a, a, a, a, a, a, a]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 40)]
    (line,) = _lines(tmp_path, "\n".join(levels))
    assert line.endswith("holds more than 50000 values once aliases are followed")


def test_an_unreadable_path_is_a_problem_not_an_exception(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "absent.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        (problem,) = load_manifests(path).problems
        assert str(problem) == f"{path}: can't be read: {words}"


def test_a_value_cannot_write_escape_codes_to_the_terminal(tmp_path: Path) -> None:
    (line,) = _lines(tmp_path, f'{HEAD}spec:\n{MODEL}  engine: {{dtype: "\\e[31m\\u2028x"}}\n')
    assert line.isprintable(), line
