"""Sinks by name: experiment trackers, and sinks of other packages. Each has its own thread, so that
one that fails or hangs neither stops nor slows training.
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
"""The longest wait for a tracker at the end, while a scheduler or a restart is waiting too."""

Tracker = tuple[Callable[..., object], Callable[[Values], object], Callable[[str], object]]
"""Three functions: log(numbers under TensorBoard's names, step=N), summarize(values), and
finish(state), where state is "finished", "stopped" or "failed". Steps never go back. Trackers put
the last numbers in their summaries themselves.

A function creates them from the config, by dotted keys, and the run's id, 32 hexadecimal digits
that a resumed run keeps. All are called in one thread.
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
            mlflow.log_params(dict(values[:100]))  # the limit of a request
            del values[:100]

    def log(tags: Values, step: int) -> None:
        legal = {}
        for tag, value in tags.items():
            legal[re.sub(r"[^\w./ :-]+", " ", tag).strip()] = value
        mlflow.log_metrics(legal, step)

    states = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    return log, mlflow.set_tags, lambda state: mlflow.end_run(states[state])


class Background:
    """A tracker as a sink. Training waits for it only briefly, at the start and the end.

    If a tracker can't start, a new run ends, and a resumed one continues without it."""

    def __init__(
        self, spec: SinkSpec, config: Values, run_id: str, log: logging.Logger, after: int
    ) -> None:
        self._name = spec.name
        self._log = log
        self._warned = False
        self._step = after
        self._steps = config["training.steps"]
        self._thread = ThreadPoolExecutor(1)
        self._tracker = self._thread.submit(resolve_name(spec.build), config, run_id)
        if after or not wait([self._tracker], START_SECONDS).done:
            return
        error = self._tracker.exception()
        if error:
            why = f"the sink {spec.name} can't start: {first_line(error)}"
            if spec.offline:
                why += f"; without a network: {spec.offline}"
            raise UserError(why)

    def write(self, step: int, tags: Values) -> None:
        # A save may end after the record of a later step.
        self._step = last = max(step, self._step)
        self._call(lambda tracker: tracker[0](tags, step=last))

    def close(self, state: str = "") -> None:
        """Report how the run ended."""
        if not state:
            state = "finished" if self._step >= self._steps else "stopped"
        ending = {"state": state, "last_step": self._step}
        last = self._call(lambda tracker: (tracker[1](ending), tracker[2](state)))
        if wait([last], END_SECONDS[state]).not_done:
            self._log.warning(f"sink {self._name}: no answer; the last records may be lost")

    def _call(self, use: Callable[[Tracker], object]) -> Future[None]:
        """Use the tracker in its thread; only the first error is logged."""

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
    specs = require_sinks(config)
    file = Path(config.job.dump_folder, RUN_ID)
    if specs and not file.exists():
        file.write_text(uuid.uuid4().hex)
    values = {key: value_of(config, key) for key in KEYS}
    return [Background(spec, values, file.read_text(), log, after) for spec in specs]


def require_sinks(config: JobConfig) -> list[SinkSpec]:
    """Return the sinks that a config names; raise UserError if the package of one is not installed.

    A folder ./wandb, which W&B leaves behind, is not the package.
    """
    settings = config.metrics
    package = config.model.package
    names = {*settings.sinks}
    if settings.enable_wandb:
        names.add("wandb")
    specs = [get_sink(name, package) for name in names]
    for spec in specs:
        if not getattr(find_spec(spec.package), "origin", None):
            command = install_command(spec.package)
            why = f"the package {spec.package} is not installed; {command}, or remove the sink"
            raise UserError(why, "metrics.sinks", spec.name)
    return specs
