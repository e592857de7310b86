"""A history in which a user's own handler and store take part."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio

from feedapi_client.stores.base import CursorStore
from feedapi_client.testing.simulator.application import (
    MOMENTS,
    Application,
    ApplicationProcess,
    Calls,
    Moment,
)
from feedapi_client.testing.simulator.clock import (
    Backend,
    run_in_virtual_time,
    threads_in_virtual_time,
)
from feedapi_client.testing.simulator.effects import Delivery, Effects
from feedapi_client.testing.simulator.manners import Manners
from feedapi_client.testing.simulator.oracle import ViolationError
from feedapi_client.testing.simulator.scenario import Scenario, Settings, Step, generate
from feedapi_client.testing.simulator.silence import silenced
from feedapi_client.testing.simulator.simulation import History
from feedapi_client.testing.simulator.supervisor import ProcessEvent
from feedapi_client.testing.simulator.watched_store import StoredPositions

MakeStore = Callable[[Path], CursorStore]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only a directory below it is used
"""Where files cost no disk write, on Linux."""
_STEPS = frozenset(
    {"publish", "split", "deploy", "fault", "store_fails", "store_stalls", "life_step"}
)
_ENDS = ("cancel", "stop", "leave", "pause", "down")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a history violated.

    Attributes:
        rule: the name of the rule; the same for all histories with the same defect.
        text: what happened.
        error: the exception that a process ended with, where that is the failure.
        trace: everything that happened, with its virtual time.
    """

    rule: str
    text: str
    error: BaseException | None
    trace: list[str]


def application_scenario(seed: int, backend: Backend) -> Scenario:
    """Return the scenario of a seed: the usual one, in which the process ends more often."""
    scenario, random = generate(seed, backend), Random(f"application {seed}")
    steps = [step for step in scenario.steps if step.do in _STEPS]
    for _ in range(random.randint(1, 3)):
        steps.insert(random.randint(1, len(steps)), _end_of_the_process(random))
    return replace(scenario, settings=_settings(scenario.settings), steps=tuple(steps))


def _settings(settings: Settings) -> Settings:
    """Return the settings for an application whose effects only `applied` knows."""
    return replace(
        settings,
        way="run",
        transactional=False,
        impatience=0.0,
        stubborn=False,
        selected=False,
        start="first",
        whole_lineage=True,
        on_failure="raise",
        flaky=0.0,
        poison=False,
        commit_every=1,
        rollbacks=0.0,
        careless=False,
        on_error="raise",
        refused_for=60.0,
        give_up_after=None,
        ordered=True,
        chosen=0,
        # With it no end is a false one: no event comes late, after those of a child (R6).
        last_cursor=True,
        follow=True,
        manners=Manners(),
    )


def _end_of_the_process(random: Random) -> Step:
    after = round(random.choice((0.02, 0.3, 2.0)) * random.random(), 3)
    if random.random() < 0.3:
        how: dict[str, Any] = {"what": random.choice(_ENDS)}
        return Step(after, "life_step", how | ({"seconds": 1.0} if "down" in how.values() else {}))
    return Step(after, "life_step", {"what": "kill", "moment": random.choice((None, *MOMENTS))})


class ApplicationHistory(History):
    """One run of a scenario with the user's application."""

    def __init__(
        self, scenario: Scenario, application: Application, store: CursorStore, delivery: Delivery
    ) -> None:
        # Again, because shrinking may have put the defaults back.
        super().__init__(replace(scenario, settings=_settings(scenario.settings)))
        self.error: BaseException | None = None
        self._application_of_user = application
        self._effects = Effects(self.world, self.oracle, delivery)
        self._calls = Calls(self.oracle)
        self._positions = StoredPositions(store, self.database, self.oracle, self._calls.saved)

    def process(self, *, follow: bool | None = None) -> ApplicationProcess:
        """Return a new process of the application."""
        return ApplicationProcess(
            self.scenario.settings,
            self.publisher,
            self.database,
            self.oracle,
            self._application,
            number=next(self._processes),
            native=self._native,
            follow=follow is not False,
            application=self._application_of_user,
            positions=self._positions,
            calls=self._calls,
            effects=self._effects,
            failed=self._failed,
        )

    def _failed(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    async def run(self) -> None:
        """Run the scenario. Raises `ViolationError`."""
        store: Any = self._positions.store
        try:
            await super().run()
            await self._application_of_user.look(store, self._effects)
            self.oracle.check()
        finally:
            if hasattr(store, "aclose"):
                with anyio.CancelScope(shield=True):
                    await store.aclose()

    def life_step(
        self,
        what: ProcessEvent,
        seconds: float = 0.0,
        which: int = 0,
        moment: Moment | None = None,
    ) -> None:
        """Let something happen to the process, perhaps at a moment of its next batch."""
        process = self.supervisor.process
        if moment is not None and isinstance(process, ApplicationProcess):
            process.dies = moment
        else:
            super().life_step(what, seconds, which)


def run_application(
    scenario: Scenario, application: Application, make_store: MakeStore, delivery: Delivery
) -> Failure | None:
    """Run a scenario with the user's application. Two runs are the same, step by step."""
    histories: list[ApplicationHistory] = []
    random = Random(f"threads {scenario.seed}")

    async def main(folder: Path) -> None:
        history = ApplicationHistory(scenario, application, make_store(folder), delivery)
        histories.append(history)
        await history.run()

    with silenced(), _folder() as folder, threads_in_virtual_time(random):
        try:
            run_in_virtual_time(
                lambda: main(folder), backend=scenario.backend, seed=f"run {scenario.seed}"
            )
        except ViolationError as violation:
            history = histories[0]
            error = history.error if violation.rule == "error" else None
            return Failure(violation.rule, str(violation), error, history.trace.lines())
        except Exception as error:
            if not histories:
                raise  # the user's own factory of stores
            text = "".join(traceback.format_exception(error))
            rule = f"crash {type(error).__name__}"
            return Failure(rule, text, error, histories[0].trace.lines())
    return None


@contextmanager
def _folder() -> Iterator[Path]:
    """Give an empty directory for one history, where possible in memory."""
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="feedapi-", dir=base) as folder:
        yield Path(folder)
