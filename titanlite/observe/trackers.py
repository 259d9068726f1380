"""Sinks by name: trackers of experiments, and those of other packages. Each has a thread of its
own, so that one that fails or hangs neither stops nor slows training.
"""

import logging
import os
import re
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

from titanlite.config.schema import KEYS, JobConfig, nested
from titanlite.config.section import value_of
from titanlite.errors import UserError, first_line, install_command
from titanlite.observe.run_folder import RUN_ID
from titanlite.observe.sinks import Values
from titanlite.registry import SinkSpec, get_sink

PROJECT = "titanlite"
START_SECONDS = 30
"""The longest wait for a tracker to start, before the first step of a run."""
END_SECONDS = {"finished": 60, "stopped": 10, "failed": 5}
"""The longest wait for it at the end: a scheduler or a restart waits too."""

Tracker = tuple[Callable[..., object], Callable[[Values], object], Callable[[str], object]]
"""Three functions: log(numbers under TensorBoard's names, step=N), summarize(values), and
finish(state), which is "finished", "stopped" or "failed". Steps never go back. A tracker's summary
has the last numbers without our help.

A function makes them from the config by dotted keys, and the run's id, 32 hexadecimal digits that a
resumed run keeps. All are called in one thread.
"""


def wandb(config: Values, run_id: str) -> Tracker:
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=run_id,
        resume="allow",
        dir=config["job.dump_folder"],
        notes=config["job.description"],
        config=nested(config),
    )
    return run.log, run.summary.update, lambda state: run.finish(int(state == "failed"))


def mlflow(config: Values, run_id: str) -> Tracker:
    folder = Path(config["job.dump_folder"])
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"{folder}/mlruns")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database is another package
    import mlflow

    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    own = f"tags.titanlite = '{run_id}'"
    for found in mlflow.search_runs(filter_string=own, output_format="list"):
        mlflow.start_run(found.info.run_id)
    if not mlflow.active_run():
        mlflow.start_run(run_name=folder.name, tags={"titanlite": run_id})
        values = [*config.items()]
        while values:
            mlflow.log_params(dict(values[:100]))  # the most that a request may have
            del values[:100]

    def log(tags: Values, step: int) -> None:
        legal = {re.sub(r"[^\w./ :-]+", " ", tag).strip(): value for tag, value in tags.items()}
        mlflow.log_metrics(legal, step)

    states = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    return log, mlflow.set_tags, lambda state: mlflow.end_run(states[state])


class Background:
    """A tracker as a sink: training never waits for it, but a short time at the start and the end.

    A run that begins ends if its tracker can't start; one that goes on does without."""

    def __init__(
        self, spec: SinkSpec, config: Values, run_id: str, log: logging.Logger, after: int
    ) -> None:
        self._name, self._log, self._warned = spec.name, log, False
        self._step, self._steps = after, config["training.steps"]
        self._thread = ThreadPoolExecutor(1)
        self._tracker = self._thread.submit(resolve_name(spec.build), config, run_id)
        started = not after and wait([self._tracker], START_SECONDS).done
        if started and (error := self._tracker.exception()):
            remedy = spec.offline and f"; without a network: {spec.offline}"
            raise UserError(f"the sink {spec.name} can't start: {first_line(error)}{remedy}")

    def write(self, step: int, tags: Values) -> None:
        # A save may end later than the record of a step after it.
        self._step = last = max(step, self._step)
        self._call(lambda tracker: tracker[0](tags, step=last))

    def close(self, state: str = "") -> None:
        """Send how the run ended."""
        state = state or ("finished" if self._step >= self._steps else "stopped")
        ending = {"state": state, "last_step": self._step}
        last = self._call(lambda tracker: (tracker[1](ending), tracker[2](state)))
        if wait([last], END_SECONDS[state]).not_done:
            self._log.warning(f"sink {self._name}: no answer; the last records may be lost")

    def _call(self, use: Callable[[Tracker], object]) -> Future[None]:
        """Let the thread use the tracker; log the first error of many."""

        def call() -> None:
            try:
                use(self._tracker.result())
            except Exception as error:
                if not self._warned:
                    self._log.warning(f"sink {self._name}: {error!r}; training continues")
                self._warned = True

        return self._thread.submit(call)


def open_trackers(config: JobConfig, log: logging.Logger, after: int) -> list[Background]:
    """Return the sinks that the config names."""
    specs, file = require_sinks(config), Path(config.job.dump_folder, RUN_ID)
    if specs and not file.exists():
        file.write_text(uuid.uuid4().hex)
    values = {key: value_of(config, key) for key in KEYS}
    return [Background(spec, values, file.read_text(), log, after) for spec in specs]


def require_sinks(config: JobConfig) -> list[SinkSpec]:
    """Return the sinks that a config names; raise UserError if the package of one is not installed.

    A folder ./wandb, which W&B leaves behind, is not the package.
    """
    settings, package = config.metrics, config.model.package
    names = {*settings.sinks, *["wandb"] * settings.enable_wandb}
    specs = [get_sink(name, package) for name in names]
    for spec in specs:
        if not getattr(find_spec(spec.package), "origin", None):
            command = install_command(spec.package)
            why = f"the package {spec.package} is not installed; {command}, or remove the sink"
            raise UserError(why, "metrics.sinks", spec.name)
    return specs
