# SPDX-License-Identifier: Apache-2.0
"""Trains from Python: `Trainer`.

Owns the initial settings, and keeps a run open between calls. Does not own the run
(`training/session.py`), which is the same as in `python -m hetjax.train`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import finalize

from hetjax.cluster.cluster import Cluster
from hetjax.data.batches import Batch
from hetjax.errors import BadInput
from hetjax.files.tables import as_kind
from hetjax.launchers.reprovisioning import split_command
from hetjax.launchers.table import LAUNCHERS, LOCAL_PROCESSES
from hetjax.models.named import TypedName
from hetjax.plans.plan import Plan
from hetjax.report.journals import Events, Metrics
from hetjax.report.progress import Display, display
from hetjax.report.run_report import RunReport
from hetjax.training.directory import rundir
from hetjax.training.directory.journal import read_journal
from hetjax.training.ending import clear_ends
from hetjax.training.layout.hardware import has_room
from hetjax.training.observers.loading import GivenObserver, observer_sources
from hetjax.training.observers.run_reports import report_of
from hetjax.training.run_model import run_model
from hetjax.training.session import Session
from hetjax.training.settings.checks import check_config
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.presets import Preset
from hetjax.training.settings.presets import preset as preset_of
from hetjax.training.settings.run_settings import with_absolute_init
from hetjax.training.settings.values import changed_config

T = TypeVar("T")


class Trainer:
    """A training run in its directory: a new run, or the one there, resumed.

    `config` is a preset's name or a `RunConfig`. Keywords change its settings, groups
    by mappings: `Trainer("tiny", steps=20, optimizer={"learning_rate": 1e-3})`.
    `cluster` and `plan` are values, or files or names as in `--cluster` and `--plan`.
    `observers` are objects or classes of `hetjax.Observer`, functions that return one,
    or names as in `--observer`. `reprovision` is a command that requests machines, as
    in `--reprovision`. Neither is a setting of the run: give both again when you resume
    it.

    The trainer holds devices and workers from the first use of the state until `close`,
    or the end of `with`; until then no other process can use the run directory. Each
    `fit` saves the state at its end. The cluster of a preset, or one with
    `simulate=True`, is simulated: by CPU devices of this process if JAX does not run
    here yet, otherwise by worker processes (`launcher="processes"`).

    All methods raise BadInput for invalid arguments, before anything is written,
    NoFeasiblePlan if no plan fits, and RunFailed if training cannot continue. After any
    of these errors, the next call continues from the last checkpoint.

    >>> Trainer("tiny", stepz=20)
    Traceback (most recent call last):
    ...
    hetjax.errors.BadInput: got: unknown setting 'stepz'
    ...
    >>> trainer = Trainer("tiny", steps=20, optimizer={"learning_rate": 1e-3})
    >>> trainer.config.steps, trainer.config.optimizer.learning_rate
    (20, 0.001)
    """

    def __init__(
        self,
        config: RunConfig | str,
        *,
        cluster: Cluster | str | Path | None = None,
        plan: Plan | str | Path | None = None,
        observers: Sequence[GivenObserver] = (),
        reprovision: str | None = None,
        **changes: Any,
    ) -> None:
        if isinstance(config, str):
            self._preset = preset_of(config)
        else:
            self._preset = Preset(summary="", config=config)
        if cluster is not None and not isinstance(cluster, Cluster):
            changes["cluster"], cluster = str(cluster), None
        if plan is not None and not isinstance(plan, Plan):
            changes["plan"], plan = str(plan), None
        changed = changed_config(self._preset.config, changes)
        changed = with_absolute_init(changed)
        self.config = replace(changed, model=TypedName(changed.model))
        check_config(self.config)
        self._cluster, self._plan = cluster, plan
        self._observers = observer_sources(observers)
        self._reprovision = split_command(reprovision, self.config.launcher)
        self._model = run_model(self.config)
        self._session: Session | None = None

    def fit(self, steps: int | None = None) -> Self:
        """Train for `steps` steps, or until `config.steps`; save the state.

        A further call continues. An interrupt (Ctrl-C, the kernel's stop button) ends
        training after the current step; a second one ends it at once, without saving.

        >>> Trainer("tiny").fit(steps=0)
        Traceback (most recent call last):
        ...
        hetjax.errors.BadInput: got: steps = 0
        ...
        """
        if steps is not None and as_kind(steps, "an integer", where="steps") < 1:
            raise BadInput(
                got=f"steps = {steps}",
                allowed="1 or more; without steps, the rest of the run",
                fix="fit(10), say",
            )
        self._call(lambda session, shown: session.fit(shown, steps))
        return self

    def evaluate(self) -> Mapping[str, Any]:
        """Return the validation loss of the current state, as a line of `metrics`.

        The line has `step`, `val_loss` (nats per token) and `val_bits_per_byte`. It is
        written once per step.
        """
        return self._call(lambda session, shown: session.evaluate(shown))

    def sample(
        self,
        prompt: str | None = None,
        *,
        num_tokens: int | None = None,
        temperature: float | None = None,
    ) -> str:
        """Return the prompt and the text that the model generates after it.

        Defaults are those of `config.evaluation`. The same state gives the same text.
        """
        given = {
            "prompt": prompt,
            "sample_tokens": num_tokens,
            "temperature": temperature,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        evaluation = changed_config(self.config, {"evaluation": changes}).evaluation
        return self._call(lambda session, shown: session.sample(shown, evaluation))

    def batch(self, step: int) -> Batch:
        """Return inputs and targets (sequences x tokens) of a step, counted from 1."""
        as_kind(step, "an integer", where="step")
        return self._call(lambda session, shown: session.batch(shown, step))

    @property
    def metrics(self) -> Metrics:
        """The lines of `metrics.jsonl` so far: a list of dicts, by step.

        This does not need pandas. With pandas, `metrics.frame()` is the same as a
        DataFrame.

        >>> Trainer("tiny", run_dir="runs/never").metrics
        []
        """
        return Metrics(read_journal(self.config.run_dir / rundir.METRICS))

    @property
    def events(self) -> Events:
        """The lines of `events.jsonl` so far: saved, recovered, goodput and others.

        >>> Trainer("tiny", run_dir="runs/never").events
        []
        """
        return Events(read_journal(self.config.run_dir / rundir.EVENTS))

    @property
    def workers(self) -> Mapping[str, int]:
        """The process id of each worker on this machine; starts workers if necessary.

        Without worker processes it is the id of this process.
        """
        return self._call(lambda session, shown: session.workers(shown))

    @property
    def plan(self) -> Plan:
        """The current plan; it changes when nodes come and go."""
        return self._call(lambda session, shown: session.plan(shown))

    def report(self) -> RunReport:
        """Return a report on the run directory so far, a page that displays itself.

        `trainer.report().save("report.html")` writes it. Each `fit` also writes it to
        the run directory. `hetjax.report_of` does this for any run directory.

        >>> Trainer("tiny", run_dir="runs/never").report()
        Traceback (most recent call last):
        ...
        hetjax.errors.BadInput: got: no run in 'runs/never'
        ...
        """
        run_dir, model = self.config.run_dir, self.config.model
        return report_of(run_dir, allow_model_code=model)

    def close(self) -> None:
        """End workers, finish pending writes, and unlock the run directory."""
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Trainer({self.config.model!r}, run_dir={str(self.config.run_dir)!r})"

    def _call(self, act: Callable[[Session, Display], T]) -> T:
        """Act on the run and show the progress. The first call opens the run.

        An error closes it, because the state in memory may then be invalid.
        """
        try:
            session = self._session or self._open()
            with clear_ends(self.config), self._display() as shown:
                return act(session, shown)
        except BaseException as error:
            self._close(error)
            raise

    def _display(self) -> AbstractContextManager[Display]:
        return display(self.config.steps, self.config.run_dir / rundir.LOG)

    def _open(self) -> Session:
        """Open the run, and lock its directory until `close` or the trainer's end."""
        config = self.config
        is_alone = not LAUNCHERS[config.launcher].has_worker_processes
        if is_alone and not has_room(config, self._preset, self._cluster):
            config = replace(config, launcher=LOCAL_PROCESSES)
        session = Session(
            config,
            self._preset,
            self._model,
            cluster=self._cluster,
            plan=self._plan,
            again="fit()",
            observers=self._observers,
            reprovision=self._reprovision,
        )
        with clear_ends(config):
            session.enter_context(rundir.locked(config.run_dir))
        finalize(self, session.close)  # at the end of the interpreter, too
        self._session = session
        return session

    def _close(self, error: BaseException | None) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        with clear_ends(self.config), self._display():
            kind, trace = type(error) if error else None, error and error.__traceback__
            session.__exit__(kind, error, trace)
