"""A scenario in words, for people who did not write the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from feedapi_client.testing.simulator.scenario import Scenario, Settings, Step

_PLAIN = Settings()
_OF_THE_SIMULATION = frozenset({"way", "transactional"})
"""Settings that are the same in each history with an application of the user's own."""
_LIFE = {
    "kill": "the process is killed",
    "down": "the process is killed, and starts again after {seconds:g} s",
    "cancel": "the process is cancelled",
    "cancel-natively": "the process is cancelled by its event loop",
    "stop": "the consumer is stopped, and its process starts again",
    "leave": "the consumer is stopped, and iterates again",
    "reenter": "the consumer is left, and entered again in the same process",
    "pause": "the process pauses for 10 s",
}
_FAULTS = {
    "html": "are answered with HTML",
    "connect": "find no connection",
    "stall": "are never answered",
    "slow": "are answered slowly",
    "torn": "are answered with a body that breaks off",
    "error-text": "are answered with an error in the middle of the body",
    "reset": "lose their connection in the middle of the body",
    "silent": "are answered without a line",
    "lag": "are answered by a replica that is {behind:g} s behind",
}


def scenario_text(scenario: Scenario) -> str:
    """Return the steps of a scenario, and the settings that are not the defaults: a line each."""
    lines, time = [_settings(scenario.settings)], 0.0
    for number, step in enumerate(scenario.steps, 1):
        time += step.after
        lines.append(f"{number:3}. at {time:.3f} s {_step(step)}")
    return "\n".join(lines)


def _settings(settings: Settings) -> str:
    """Return the settings that matter to an application."""
    given = [
        f"{field.name}={getattr(settings, field.name)!r}"
        for field in fields(settings)
        if field.name not in _OF_THE_SIMULATION
        and getattr(settings, field.name) != getattr(_PLAIN, field.name)
    ]
    return f"settings: {', '.join(given) or 'the defaults'}"


def _step(step: Step) -> str:
    teller = _TELLERS.get(step.do)
    return str(step) if teller is None else teller(**step.how)


def _publish(count: int, entities: int) -> str:
    of = "" if entities == 1 else f" of up to {_number(min(entities, count), 'entity', 'entities')}"
    return f"{_number(count, 'event is', 'events are')} published{of}"


def _split(which: int, parts: int, method: str) -> str:
    how = "start after it" if method == "starts-after" else "take over its cursor"
    parts_text = _number(parts, "partition", "partitions")
    return f"a partition (number {which} of the open ones) is split into {parts_text} that {how}"


def _deploy(dialect: str, seconds: float) -> str:
    return f"the publisher deploys a new version ({dialect}) within {seconds:g} s"


def _fault(kind: str, on: str, share: float, seconds: float, **more: Any) -> str:
    requests = "requests" if on == "both" else {"fetch": "fetches"}.get(on, "discoveries")
    what = _FAULTS.get(kind, f"are answered {kind}").format(**more)
    return f"{share:.0%} of the {requests} {what}, for {seconds:g} s"


def _store_fails(share: float, seconds: float) -> str:
    return f"{share:.0%} of the store's operations fail, for {seconds:g} s"


def _store_stalls(seconds: float) -> str:
    return f"the store's operations take up to a minute, for {seconds:g} s"


def _life(what: str, seconds: float = 0.0, moment: str | None = None) -> str:
    text = _LIFE.get(what, what).format(seconds=seconds)
    return text if moment is None else f"{text} {moment} of the next batch"


def _number(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


_TELLERS: dict[str, Callable[..., str]] = {
    "publish": _publish,
    "split": _split,
    "deploy": _deploy,
    "fault": _fault,
    "store_fails": _store_fails,
    "store_stalls": _store_stalls,
    "life_step": _life,
}
