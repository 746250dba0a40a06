"""One sentence for each condition, reason and failure class of a status, for the generated reference."""

from collections.abc import Mapping
from typing import Final

from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import FailureClass

CONDITIONS: Final[Mapping[ConditionType, str]] = {
    ConditionType.READY: "All wanted groups are ready. Its reason is the REASON column of `kubectl get plm`.",
    ConditionType.AVAILABLE: "At least one group is ready.",
    ConditionType.PROGRESSING: "Groups are starting, restarting or being replaced.",
    ConditionType.DEGRADED: "A group has failed permanently.",
    ConditionType.STALLED: "Waiting won't help: a group has failed permanently, the spec is refused, or "
    "`rollout.progressDeadlineSeconds` has passed. kstatus (Flux, `helm --wait`) reads it.",
}

REASONS: Final[Mapping[Reason, str]] = {
    Reason.ALL_GROUPS_READY: "All wanted groups are ready. The message also says if stages use CPUs because no GPU is "
    "requested (`engine.device: auto`), and if each new pod downloads the model again.",
    Reason.GROUPS_NOT_READY: "Some wanted groups are not ready.",
    Reason.GROUPS_STARTING: "Groups are starting.",
    Reason.GROUP_FAILED: "A group is down and its failure is not on record.",
    Reason.BACKING_OFF: "A failed group is waiting for its next restart.",
    Reason.RESTART_BUDGET_SPENT: "A group failed too often within `restart.windowSeconds` and stays down.",
    Reason.BAD_CONFIGURATION: "The spec can't work. It is not retried until it changes.",
    Reason.AS_EXPECTED: "The condition needs no explanation.",
    Reason.SUSPENDED: "`spec.suspend` is true.",
    Reason.SCALED_TO_ZERO: "`spec.replicas` is 0.",
    Reason.ROLLING_OUT: "Groups are being replaced by a new revision.",
    Reason.UNSCHEDULABLE: "No node fits a stage.",
    Reason.IMAGE_PULL: "A node can't pull an image.",
    Reason.NOT_STARTED: "A kubelet can't start a stage's containers: a volume or a Secret is missing.",
    Reason.QUOTA_EXCEEDED: "A ResourceQuota refuses a pod.",
    Reason.POD_REFUSED: "The API server refuses a pod: an admission policy, a webhook or a missing right.",
    Reason.NODE_UNREACHABLE: "Nodes are unreachable but not considered lost; their pods are left alone.",
    Reason.WRITE_REFUSED: "The API server refuses another object of the model.",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "No group became ready within `rollout.progressDeadlineSeconds`.",
}

FAILURE_CLASSES: Final[Mapping[FailureClass, tuple[str, str]]] = {
    FailureClass.BAD_CONFIG: ("The configuration can't work.", "not retried until the template changes"),
    FailureClass.MODEL_LOAD: ("The model can't be fetched or loaded.", "yes"),
    FailureClass.OUT_OF_MEMORY: ("The process ran out of memory, on the host or the device.", "yes"),
    FailureClass.OOM_KILLED: ("The kernel killed a container over its memory limit, or on a full node.", "yes"),
    FailureClass.RENDEZVOUS_TIMEOUT: (
        "Engine and stages did not connect within `timeouts.rendezvousSeconds`, although all had started.",
        "yes",
    ),
    FailureClass.STEP_TIMEOUT: ("A step took longer than `timeouts.stepSeconds`; names the stage that hung.", "yes"),
    FailureClass.PEER_LOST: ("A stage lost its connection to another; the other's failure is the cause.", "yes"),
    FailureClass.ENGINE_LOST: ("A stage lost the engine; the engine's failure is the cause.", "yes"),
    FailureClass.INTERNAL: ("An unexpected error.", "yes"),
    FailureClass.KILLED: ("A signal killed the process.", "yes"),
    FailureClass.CRASH_LOOP: ("The third end in a row before the group was ready, without another class.", "yes"),
    FailureClass.NODE_LOST: ("The node is gone or unreachable.", "yes"),
    FailureClass.EVICTED: (
        "A pod was deleted, preempted or drained, or its node shut down.",
        "no; yes if the pod exceeded its own disk limit",
    ),
    FailureClass.UNSCHEDULABLE: ("No node fits a stage, or a kubelet refuses its pod.", "no"),
    FailureClass.IMAGE_PULL: ("An image can't be pulled, for a group that was never ready.", "no"),
    FailureClass.NOT_STARTED: ("A stage's containers can't start, for a group that was never ready.", "no"),
    FailureClass.QUOTA_EXCEEDED: ("A ResourceQuota refuses a pod.", "no"),
    FailureClass.POD_REFUSED: ("The API server refuses a pod for another reason.", "no"),
}
"""Meaning, and whether it uses a restart."""
