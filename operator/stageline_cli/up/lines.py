"""What `stageline up` tells a person at its turning points, as lines. Pure."""

from stageline_api.conditions import ConditionType, Reason
from stageline_api.failures import ExitCode
from stageline_api.resource.status import PipelineModelStatus
from stageline_local.monitoring.options import MonitorOptions
from stageline_operator.planner.types import GroupPhase


def restart_lines(status: PipelineModelStatus) -> list[str]:
    """When each failed group will be restarted."""
    return [
        f"group {group.index} restarts at {group.backoff_until.astimezone():%H:%M:%S} "
        f"(restart {len(group.restarts) + 1} in the window)"
        for group in status.groups
        if group.phase == GroupPhase.TERMINATING and group.backoff_until is not None
    ]


def hopeless_cause(status: PipelineModelStatus) -> tuple[str, int] | None:
    """Sentence and exit status when every group is down for good; None while there is hope."""
    conditions = {condition.type: condition for condition in status.conditions}
    degraded = conditions.get(ConditionType.DEGRADED)
    if degraded is None or degraded.status != "True":
        return None
    if any(group.phase != GroupPhase.FAILED for group in status.groups):
        return None
    is_bad = degraded.reason == Reason.BAD_CONFIGURATION
    return degraded.message, int(ExitCode.BAD_CONFIG if is_bad else ExitCode.INTERNAL)


def ready_lines(url: str, served_name: str, name: str) -> list[str]:
    """What a person can do with a running endpoint, ready to be pasted."""
    body = f'{{"model": "{served_name}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    return [
        "",
        f"{served_name} is ready at {url}/v1",
        "",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{url}/v1", api_key="none")',
        f'  reply = client.chat.completions.create(model="{served_name}", '
        'messages=[{"role": "user", "content": "Hello!"}])',
        "  print(reply.choices[0].message.content)",
        "",
        f"End it with Ctrl-C, or from elsewhere with: stageline down {name}",
    ]


def monitor_lines(options: MonitorOptions | None) -> list[str]:
    """Where to look at what is monitored."""
    if options is None:
        return []
    lines = [f"Boards and alerts: {options.boards_url} (Prometheus: {options.prometheus_url})"]
    if options.alert_speed != 1:
        lines.append(f"This is a drill: alerts fire after 1/{options.alert_speed:g} of their usual time")
    return lines
