"""What a run records: metrics.jsonl always, TensorBoard when asked; and the line that people read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


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
    data_seconds: float
    memory_gib: float

    def line(self, steps: int, memory_percent: float) -> str:
        """The console's line; parsers rely on its first fields."""
        mfu = "n/a" if self.mfu is None else f"{self.mfu:.2f}%"
        eta = duration((steps - self.step) * self.step_seconds)
        return (
            f"step: {self.step:2}  loss: {self.loss:8.5f}  grad_norm: {self.grad_norm:7.4f}  "
            f"memory: {self.memory_gib:5.2f}GiB({memory_percent:.2f}%)  tps: {round(self.tps):,}  "
            f"tflops: {self.tflops:,.2f}  mfu: {mfu}  eta: {eta}"
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
            "time_metrics/data_loading(s)": self.data_seconds,
            "time_metrics/data_loading(%)": 100 * self.data_seconds / self.step_seconds,
        }
        return tags if self.mfu is None else {**tags, "mfu(%)": self.mfu}


class Sink(Protocol):
    """Somewhere that records go."""

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None: ...

    def validation(self, step: int, loss: float) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: one object a line, floats in full precision, every line on disk at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None:
        self._file.write(json.dumps(asdict(record)) + "\n")

    def validation(self, step: int, loss: float) -> None:
        self._file.write(json.dumps({"step": step, "validation_loss": loss}) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # costs half a second

        self._writer = SummaryWriter(str(folder))

    def step(self, record: StepRecord, memory_tags: dict[str, float]) -> None:
        self._write(record.step, {**record.tags(), **memory_tags})

    def validation(self, step: int, loss: float) -> None:
        self._write(step, {"validation_metrics/loss": loss})

    def _write(self, step: int, tags: dict[str, float]) -> None:
        for tag, value in tags.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # a killed run loses nothing

    def close(self) -> None:
        self._writer.close()


def duration(seconds: float) -> str:
    """Seconds as 1:02:03, 2:03 or 0:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
