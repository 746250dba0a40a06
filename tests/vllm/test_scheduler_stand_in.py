"""The stand-ins for vLLM's schedulers have no name and no argument that the real wheel does not have."""

import inspect
import json
import subprocess

from processes.vllm_scheduler_stand_in import AsyncScheduler, Request, Scheduler, SchedulerOutput, vllm_config
from processes.vllm_served import vllm_python

ASK = """
import inspect, json, sys
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
sys.stdout.write(json.dumps({
    "schedule": [[one.name, repr(one.default)] for one in inspect.signature(Scheduler.schedule).parameters.values()],
    "async_has_schedule": "schedule" in vars(AsyncScheduler),
    "async_bases": [one.__name__ for one in AsyncScheduler.__bases__],
    "scheduler": inspect.getsource(Scheduler),
    "methods": dir(Scheduler),
    "request": inspect.getsource(Request),
    "output": sorted(SchedulerOutput.__dataclass_fields__),
}) + "\\n")
"""
OWN = {"chunk", "preempt_next", "fail_next"}
"""Knobs of the stand-in's tests."""


def test_the_real_schedulers_have_what_the_stand_ins_have() -> None:
    asked = subprocess.run([str(vllm_python()), "-c", ASK], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    real = json.loads(asked.stdout.splitlines()[-1])
    parameters = inspect.signature(Scheduler.schedule).parameters.values()
    assert real["schedule"] == [[one.name, repr(one.default)] for one in parameters]
    assert not real["async_has_schedule"]
    assert real["async_bases"] == [one.__name__ for one in AsyncScheduler.__bases__]
    attributes = vars(Scheduler(vllm_config=vllm_config(2))).keys() - OWN
    assert not [name for name in attributes if f"self.{name}" not in real["scheduler"]], attributes
    methods = {name for name in vars(Scheduler) if not name.startswith("__")}
    assert methods <= {*real["methods"]}, methods
    fields = Request.__dataclass_fields__.keys()
    assert not [one for one in fields if f"self.{one}" not in real["request"] and f"def {one}(" not in real["request"]]
    assert SchedulerOutput.__dataclass_fields__.keys() <= {*real["output"]}, real["output"]
