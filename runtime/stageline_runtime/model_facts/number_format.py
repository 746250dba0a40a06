"""The one place that decides in which number format a group computes."""

from typing import NamedTuple


class NumberFormat(NamedTuple):
    dtype: str
    reason: str


def choose_number_format(asked: str, of_model: str, *, on_devices: bool, slow_cpus: str = "") -> NumberFormat:
    """What `spec.engine.dtype` means for a model: `auto` is the checkpoint's own where that is fast, else float32.

    float32 holds every float16 and bfloat16 number. On CPUs products of many rows in float16 take four times as long
    (docs/dev/log), and in bfloat16 where a CPU has no units for it. `slow_cpus` names such CPUs of the group; one is
    enough, because all stages must compute in the same format.
    """
    if asked != "auto":
        return NumberFormat(asked, "spec.engine.dtype")
    if of_model == "float16" and not on_devices:
        return NumberFormat("float32", "spec.engine.dtype auto: CPUs are slow in the model's float16")
    if of_model == "bfloat16" and slow_cpus:
        reason = f"spec.engine.dtype auto: no units for the model's bfloat16 in {slow_cpus}"
        return NumberFormat("float32", reason)
    return NumberFormat(of_model, "spec.engine.dtype auto: the model's own")
