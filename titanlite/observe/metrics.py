"""What a run records: metrics.jsonl always, TensorBoard and W&B when asked; and the line that people read."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from titanlite.config.schema import JobConfig
from titanlite.errors import UserError


@dataclass(frozen=True)
class StepRecord:
    """One logged step; the fields of a line in metrics.jsonl."""

    step: int
    loss: float
    max_loss: float
    grad_norm: float
    lr: float
    tokens: int
    tps: float
    tflops: float
    mfu: float | None
    step_seconds: float
    step_seconds_p50: float
    step_seconds_p95: float
    data_seconds: float
    memory_gib: float
    recompiles: int

    @property
    def data_percent(self) -> float:
        """Share of the step's time for which it waited for data."""
        return 100 * self.data_seconds / self.step_seconds

    def line(self, steps: int, memory_percent: float) -> str:
        """The console's line; parsers rely on its first fields."""
        mfu = "n/a" if self.mfu is None else f"{self.mfu:.2f}%"
        eta = duration((steps - self.step) * self.step_seconds)
        return (
            f"step: {self.step:2}  loss: {self.loss:8.5f}  grad_norm: {self.grad_norm:7.4f}  "
            f"memory: {self.memory_gib:5.2f}GiB({memory_percent:.2f}%)  tps: {round(self.tps):,}  "
            f"tflops: {self.tflops:,.2f}  mfu: {mfu}  eta: {eta}  data: {self.data_percent:.1f}%"
        )

    def tags(self) -> dict[str, float]:
        """Names that dashboards know from TorchTitan."""
        tags = {
            "loss_metrics/global_avg_loss": self.loss,
            "loss_metrics/global_max_loss": self.max_loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "n_tokens_seen": self.tokens,
            "throughput(tps)": self.tps,
            "tflops": self.tflops,
            "time_metrics/end_to_end(s)": self.step_seconds,
            "time_metrics/p50(s)": self.step_seconds_p50,
            "time_metrics/p95(s)": self.step_seconds_p95,
            "time_metrics/data_loading(s)": self.data_seconds,
            "time_metrics/data_loading(%)": self.data_percent,
            "recompiles": self.recompiles,
        }
        return tags if self.mfu is None else {**tags, "mfu(%)": self.mfu}


class Sink(Protocol):
    """Somewhere that records go."""

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None: ...

    def validation(self, step: int, loss: float) -> None: ...

    def checkpoint(self, step: int, seconds: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def open_sinks(folder: Path, config: JobConfig, after: int = 0) -> list[Sink]:
    """Every sink that is asked for; none shuts out another. A run that goes on after a step drops what an earlier
    attempt recorded of later ones."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", after)]
    if config.metrics.enable_tensorboard:
        sinks.append(TensorBoard(folder / config.metrics.save_tb_folder, after))
    if config.metrics.enable_wandb:
        sinks.append(WeightsAndBiases(folder, config))
    return sinks


class JsonLines:
    """metrics.jsonl: one object a line, floats in full precision, every line on disk at once."""

    def __init__(self, path: Path, after: int = 0) -> None:
        if path.exists():
            _drop_later(path, after)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def validation(self, step: int, loss: float) -> None:
        self._file.write(json.dumps({"step": step, "validation_loss": loss}) + "\n")

    def checkpoint(self, step: int, seconds: dict[str, float]) -> None:
        costs = {f"checkpoint_{what}_seconds": value for what, value in seconds.items()}
        self._file.write(json.dumps({"step": step, **costs}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard events."""

    def __init__(self, folder: Path, after: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # costs half a second

        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None:
        self._write(record.step, {**record.tags(), **memory_tags})

    def validation(self, step: int, loss: float) -> None:
        self._write(step, {"validation_metrics/loss": loss})

    def checkpoint(self, step: int, seconds: dict[str, float]) -> None:
        self._write(step, _checkpoint_tags(seconds))

    def _write(self, step: int, tags: dict[str, float]) -> None:
        for tag, value in tags.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # a killed run loses nothing

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A Weights & Biases run, under TensorBoard's tags. WANDB_MODE, WANDB_ENTITY and the like work as ever."""

    def __init__(self, folder: Path, config: JobConfig) -> None:
        require_wandb()
        import wandb  # half a second, and an extra

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "titanlite"),
                dir=folder,
                notes=config.job.description,
                config=config.model_dump(),
            )
        except wandb.Error as error:  # no key, no network
            raise UserError(f"metrics.enable_wandb = true: {error} Without a network: WANDB_MODE=offline") from error

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None:
        self._run.log({**record.tags(), **memory_tags}, step=record.step)

    def validation(self, step: int, loss: float) -> None:
        self._run.log({"validation_metrics/loss": loss}, step=step)

    def checkpoint(self, step: int, seconds: dict[str, float]) -> None:
        self._run.log(_checkpoint_tags(seconds), commit=False)  # W&B drops what comes for a step that is over

    def close(self) -> None:
        self._run.finish()


def _checkpoint_tags(seconds: dict[str, float]) -> dict[str, float]:
    return {f"time_metrics/checkpoint_{what}(s)": value for what, value in seconds.items()}


def _drop_later(path: Path, after: int) -> None:
    """Cut a metrics.jsonl where its first step after `after` begins, or a line that a kill left unfinished."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] > after or not line.endswith(b"\n"):
                    break
            except (ValueError, KeyError, TypeError):
                break
            end += len(line)
    os.truncate(path, end)


def require_wandb() -> None:
    """Refuse W&B where the package is absent. (A folder ./wandb, which W&B itself leaves, is no package.)"""
    spec = find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UserError(
            "metrics.enable_wandb = true: the package wandb is not installed; "
            f"{sys.executable} -m pip install wandb, or leave the key out"
        )


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, 2:03 or 0:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
