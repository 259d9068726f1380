"""The lines that a run prints at its end: where its files are, and what to type next.

Imports no torch, since the launcher prints them too.
"""

from pathlib import Path

from titanlite.checkpoint.status import command_for, last_saved_message, name_of, newest_step
from titanlite.config.schema import JobConfig
from titanlite.errors import command_line
from titanlite.runtime.page import EarlyExit


def describe_end(config: JobConfig) -> str:
    """Return the lines."""
    folder = Path(config.job.dump_folder)
    reached = f"\ntitanlite: step {config.training.steps} reached"
    if not (folder / "metrics.jsonl").exists():
        return f"{reached}; {folder}, which had its files, was removed"
    rows: dict[str, object] = {
        "metrics": folder / "metrics.jsonl",
        "config": folder / "config.toml",
        "logs": folder / "logs",
        "checkpoints": last_saved_message(config),
    }
    if config.metrics.enable_tensorboard:
        logs = str(folder / config.metrics.save_tb_folder)
        rows["TensorBoard"] = command_line("tensorboard", "--logdir", logs)
    if config.profiling.enable_profiling:
        rows["traces"] = (
            f"{folder / config.profiling.save_traces_folder}, for https://ui.perfetto.dev"
        )
    rows["plot"] = command_line("titanlite", "plot", str(folder))
    rows["report"] = command_line("titanlite", "report", str(folder))
    if config.checkpoint.enable:
        asks = []
        if config.training.dataset == "chat":
            asks = ["--chat", "--prompt", "a question"]
        rows["generate"] = command_for(config, "generate", *asks)
        rows["continue"] = "the same command with a larger --training.steps"
    lines = [f"{name:<12} {text}" for name, text in rows.items()]
    return "\n  ".join([reached, *lines])


def describe_stop(config: JobConfig, left: EarlyExit) -> str:
    """Return the line of a run that stopped on request."""
    if not left.step:
        kept = None
        if config.checkpoint.enable:
            kept = newest_step(config)
        still = ""
        if kept is not None:
            still = f"; the newest checkpoint is still {name_of(config, kept)}"
        return f"stopped before a step on request ({left.reason}): nothing was trained{still}"
    lost = ""
    if left.lost == 1:
        lost = ", 1 step is lost"
    elif left.lost:
        lost = f", {left.lost} steps are lost"
    where = f"step {left.step} of {config.training.steps} on request ({left.reason}){lost}"
    if left.step == config.training.steps:
        where += "; no step is left, but a validation or a sample may be missing"
    return f"stopped at {where}; {last_saved_message(config)}"
