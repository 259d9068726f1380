"""Check this machine for a job before any worker starts; all problems are reported together."""

from __future__ import annotations

import errno
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.status import look
from titanlite.config.hardware_table import recognize
from titanlite.config.job import Job
from titanlite.config.load import ConfigError, ConfigFault, Entry, Loaded
from titanlite.config.needs import is_streamed
from titanlite.config.optimizer_state import place_of_state
from titanlite.config.resharding import RESHARD, is_to_choose
from titanlite.config.schema import JobConfig
from titanlite.config.urls import is_url
from titanlite.errors import UserError, first_line, format_bytes
from titanlite.launch.nodes import check_gpus, gpu_bytes, gpu_capability, gpu_name
from titanlite.launch.start import check_start
from titanlite.launch.terminal import say
from titanlite.observe.run_folder import METRICS
from titanlite.runtime.bucket import BucketError
from titanlite.runtime.forks import in_a_fork

if TYPE_CHECKING:
    from torch import nn

    from titanlite.parallel.build import ParameterTable
    from titanlite.train.prepared import Prepared

RunCheck = Callable[..., Any]
"""Calls a function with arguments, and records the message of a UserError."""

_PYTHON_AND_TORCH = 400 << 20
"""Bytes of a rank without a model; with debug.toml's, a rank had 460 MB in all (torch 2.14)."""


def check_machine(
    job: Job,
    device: str,
    processes: int,
    first_node: bool = True,
    entries: Mapping[str, Entry] = {},
) -> Prepared:
    """Return what the checks have opened and built; raise a UserError that lists everything this
    machine lacks for the job. `entries` has the origins of the config's values.
    """
    from titanlite.optim import check_trained
    from titanlite.parallel import float8, replicated, tensor_parallel
    from titanlite.parallel.build import build_model
    from titanlite.train.prepared import Prepared

    prepared = Prepared()
    problems = list[str]()
    faults = list[ConfigFault]()

    def check(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UserError as error:
            if "dataset" in error.key:
                faults.append(_fault(error, entries))
            elif str(error) not in problems:
                problems.append(str(error))

    check(check_gpus, device)
    if not problems:
        _check_without_model(check, job, device, prepared)
        check(_check_bucket, job.config)  # on each node: each has its own network and credentials
        if first_node:
            check(check_start, job.config, job)
        built = check(build_model, job)
        if built:
            prepared.model = model, table = built
            check(check_trained, model, table, job)
            check(tensor_parallel.check, model, table, job.layout.tp)
            check(replicated.kept_whole, job, table)
            if job.config.quantize.linear.float8.enable:
                check(float8.plan, model, job, table)
            _check_sizes(check, job, device, processes, model, table)
    _raise_any(job, problems, faults)
    return prepared


def _raise_any(job: Job, problems: list[str], faults: list[ConfigFault]) -> None:
    parts = [str(ConfigError(faults))] if faults else []
    if problems:
        name = f"{job.config.model.name} {job.config.model.flavor}"
        title = f"can't train {name} here with this config; nothing was started"
        parts.append("\n  ".join([title, *problems]))
    if parts:
        raise UserError("\n".join(parts))


def rank_bytes(job: Job, device: str, processes: int) -> int | None:
    """Return the memory that a rank has for parameters and optimizer state; None if unknown."""
    from titanlite.observe.memory import machine_bytes

    if device == "cuda" and not job.config.training.enable_cpu_offload:
        return gpu_bytes()
    machine = machine_bytes()
    if machine < processes * _PYTHON_AND_TORCH:
        need = format_bytes(processes * _PYTHON_AND_TORCH)
        most = machine // _PYTHON_AND_TORCH
        raise UserError(
            f"memory: {processes} processes need {need} before they have a model, and this machine "
            f"has {format_bytes(machine)}; at most {most} (NGPU)"
        )
    return machine // processes - _PYTHON_AND_TORCH


def file_faults(loaded: Loaded) -> list[ConfigFault]:
    """Return the faults in an invalid config's data sets and starting checkpoint, found without its
    model.
    """
    from titanlite.data.documents import require_folder
    from titanlite.data.sources import find_documents
    from titanlite.data.tokenizer import is_model_alone, load_tokenizer

    config = loaded.config
    found = list[ConfigFault]()
    assets = config.model.hf_assets_path
    checks = list[tuple[Any, ...]]()
    if not is_url(assets) and not is_model_alone(Path(assets)):  # token shards may need no more
        checks.append((load_tokenizer, assets))
    for section, part in _datasets(config):
        if is_streamed(part.dataset):
            checks.append((require_folder, section, part.dataset_path))
            continue
        if part.dataset in ("text", "tokens", "chat") and not part.dataset_path:
            continue
        text_key = config.training.text_key
        checks.append((find_documents, section, part.dataset, part.dataset_path, text_key))
    if config.checkpoint.load_step == -1:
        checks.append((check_start, config))
    for function, *arguments in checks:
        try:
            function(*arguments)
        except UserError as error:
            found.append(_fault(error, loaded.entries, str(arguments[0])))
    return found


def _fault(error: UserError, entries: Mapping[str, Entry], key: str = "") -> ConfigFault:
    """Return a data fault with the origin of its value; `key` is for an error that has none."""
    entry = entries.get(error.key.partition(" entry ")[0])  # a mixture's entries have one origin
    origin = entry.origin if entry else ""
    return ConfigFault(error.key or key, error.why, error.value, origin)


def _datasets(config: JobConfig) -> list[tuple[str, Any]]:
    """Return the data sets of a run, each with its section."""
    parts: list[tuple[str, Any]] = [*config.training.named_sources]
    if config.validation.enable:
        return [*parts, ("validation", config.validation)]
    return parts


def _open_dataset(key: str, dataset: Any, job: Job, prepared: Prepared) -> str:
    """Open a data set; return a notice about it, if any. Text that would take long to tokenize is
    not read.
    """
    from titanlite.data.shards import ShardSource
    from titanlite.data.sources import find_documents, open_source
    from titanlite.data.stream import open_stream
    from titanlite.data.tokenizer import ByteTokenizer

    name = dataset.dataset
    path = dataset.dataset_path
    if is_streamed(name):
        open_stream(key, name, path, job.config.training.text_key)
        return ""
    training = job.config.training
    tokenizer = prepared.tokenizer
    place = key, name, path
    opening = *place, tokenizer, job.shape.vocab_size, training.text_key
    documents = find_documents(*place, training.text_key)
    if documents:
        are_bytes = isinstance(tokenizer, ByteTokenizer) and documents.are_plain
        if tokenizer and (are_bytes or name == "chat"):  # other text may take hours
            prepared.sources[place] = open_source(*opening)
        return documents.notice
    source = open_source(*opening)
    assert isinstance(source, ShardSource)
    source.require_whole()
    if not source.remote:
        prepared.sources[place] = source
    return ""


def _check_without_model(check: RunCheck, job: Job, device: str, prepared: Prepared) -> None:
    from titanlite.data.tokenizer import open_tokenizer, require_tokenizer
    from titanlite.observe.trackers import require_sinks
    from titanlite.parallel import compile, float8, fsdp
    from titanlite.parallel.convert import build_converters

    config = job.config
    check(_check_dump_folder, Path(config.job.dump_folder))
    opened = check(lambda: [open_tokenizer(job)])
    if opened:
        prepared.tokenizer = opened[0]
    for section, dataset in _datasets(config):
        notice = check(_open_dataset, section, dataset, job, prepared)
        if notice:
            say(f"titanlite: {notice}")
        if opened and dataset.dataset != "tokens":
            purpose = f'{section}.dataset = "{dataset.dataset}"'
            check(require_tokenizer, prepared.tokenizer, purpose)
    check(compile.check_backend, config.compile)
    check(compile.check_cache_folder, config.compile)
    check(fsdp.check_keys, config.parallelism)
    if device == "cuda" and config.compile.enable and config.compile.backend == "inductor":
        check(_check_triton, "compile.enable")
    elif device == "cuda" and config.training.document_mask:
        check(_check_triton, "training.document_mask")  # FlexAttention is always compiled
    prepared.converters = check(build_converters, job) or ()
    if config.quantize.linear.float8.enable:
        capability = gpu_capability() if device == "cuda" else None
        check(float8.check_device, job, device, capability)
    check(require_sinks, config)


def _check_dump_folder(folder: Path) -> None:
    existing = folder.absolute()
    while not os.path.exists(existing):
        existing = existing.parent
    try:  # os.access is wrong about /proc and about file servers that refuse
        with tempfile.TemporaryDirectory(dir=existing, prefix=".titanlite-") as probe:
            Path(probe, "byte").write_bytes(b"0")
    except OSError as error:
        reason = ""
        if error.errno != errno.ENOENT:  # misleading, but what /proc answers
            reason = f" ({error.strerror})"
        why = f"nothing can be written in {existing}{reason}"
        raise UserError(f'job.dump_folder = "{folder}": {why}') from None
    metrics = folder / METRICS
    try:
        if metrics.exists():
            metrics.open("ab").close()
    except OSError as error:
        why = f"{metrics} cannot be written ({error.strerror})"
        raise UserError(f'job.dump_folder = "{folder}": {why}') from None


def _check_bucket(config: JobConfig) -> None:
    """Raise if the bucket of the checkpoints cannot be used."""
    try:
        look(config)
    except BucketError as error:
        raise UserError(f"checkpoint.folder: {error}") from None


def _check_triton(key: str) -> None:
    """Check for the compiler and headers that Triton 3.6 to 3.9 needs for its launchers; without
    them the first step would fail.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        remedy = "install gcc or clang, or let CC name a compiler"
        raise UserError(
            f"{key} = true needs a C compiler on a GPU, where Triton calls it: {remedy}"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not (header.exists() or os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH")):
        remedy = "install Python's headers (Debian, Ubuntu: apt install python3-dev)"
        raise UserError(f"{key} = true needs {header} on a GPU, where Triton includes it: {remedy}")


def _stages_alone(job: Job, model: nn.Module) -> list[list[nn.Module]]:
    """Return the stages of every pipeline rank; raise UserError if one cannot run without the rest
    of the model.
    """
    import torch

    from titanlite.parallel.pipeline_parallel import cut

    if job.layout.pp == 1:
        return [[model]]
    parts = cut(model, job.spec, job.stages.names)
    hidden = positions = torch.zeros(1, 8 * job.layout.tp, dtype=torch.int64, device="meta")
    for stage, part in enumerate(parts):
        try:
            hidden = part(hidden, positions)
        except Exception as error:
            why = (
                f"{job.spec.name} cannot run stage {stage} of {len(parts)} without the others: "
                f"{first_line(error)}"
            )
            raise UserError(
                f"pipeline parallel: {why}; docs/extending.md says what a stage needs of forward"
            ) from None
    return [[parts[stage] for stage in stages] for stages in job.stages.ranks]


def _check_sizes(
    check: RunCheck,
    job: Job,
    device: str,
    processes: int,
    model: nn.Module,
    table: ParameterTable,
) -> None:
    """Check that stages run alone, and that the model and the optimizer's state have room."""

    @cache
    def static_of_first() -> dict[str, int]:  # builds its part of the model: once for both checks
        from titanlite.planner.rehearse import static_bytes

        return static_bytes(job)

    parts = check(_stages_alone, job, model)
    if parts:
        available = rank_bytes(job, device, processes)
        check(_check_memory, job, parts, table, static_of_first, available)
    if place_of_state(job.config) != "device":
        check(_check_state, job, static_of_first, processes)


def _check_memory(
    job: Job,
    parts: list[list[nn.Module]],
    table: ParameterTable,
    find_static: Callable[[], dict[str, int]],
    available: int | None,
) -> None:
    """Raise if a rank's share of parameters, gradients and optimizer state exceeds its memory in
    bytes, if that is known.
    """
    from titanlite.parallel.build import build_meta_model

    element_size = next(parts[0][0].parameters()).element_size()
    sizes = [_state_size(job, of_rank, table, element_size) for of_rank in parts]
    total = sum(sizes)
    if available is None or total <= available:
        return
    static = find_static()
    first = static["parameters"] + static["gradients"]
    if place_of_state(job.config) == "device":
        first += static["optimizer"]
    # For the other pipeline ranks, assume that their stages are split evenly.
    per_rank = max(first, *(size * job.layout.pp // job.layout.model_shards for size in sizes))
    if per_rank <= available:
        return
    fitting = []
    for flavor in job.spec.flavors:
        smaller, smaller_table = build_meta_model(job.spec, job.spec.configure(flavor, {}))
        size = _state_size(job, [smaller], smaller_table, element_size)
        if size // job.layout.model_shards <= available:
            fitting.append(flavor)
    which = "one" if job.layout.pp > 1 else "each"
    has = format_bytes(available)
    if job.config.training.enable_cpu_offload:
        has += " of host memory"
    remedy = f"≥ {-(-total // available)} such ranks, or ≥ {-(-total // (60 << 30))} 80-GB GPUs"
    if fitting:
        remedy += f", or with --model.flavor {' or '.join(fitting)}"
    raise UserError(
        f"memory: parameters, gradients and optimizer state need {format_bytes(total)} in total, "
        f"{format_bytes(per_rank)} on {which} of the {job.layout.model_shards} ranks that share "
        f"them, and a rank has {has}\n"
        f"      would fit on {remedy}"
    )


def _check_state(job: Job, find_static: Callable[[], dict[str, int]], processes: int) -> None:
    """Raise unless the host or the disk has room for this node's optimizer state."""
    from titanlite.observe.memory import machine_bytes
    from titanlite.optim.state_store import reserve

    size = processes * find_static()["optimizer"]
    if place_of_state(job.config) == "disk":
        reserve(job.config.optimizer.state_folder, size).close()
        return
    room = machine_bytes() - processes * _PYTHON_AND_TORCH
    if size > room:
        raise UserError(
            f'optimizer.state_on = "host": the state of {processes} ranks needs '
            f"{format_bytes(size)}, but this machine has {format_bytes(room)} besides the processes"
        )


def choose_resharding(job: Job, device: str) -> tuple[str, str]:
    """Return what parallelism.fsdp_reshard_after_forward "auto" stands for on this machine, and
    why; both are empty if there is nothing to choose.
    """
    if not is_to_choose(job):
        return "", ""
    if device == "cpu":
        return "default", "assumed on a CPU"
    name = gpu_name() or "of this machine"
    known = recognize(name, gpu_bytes())
    if not known:
        return "default", f"assumed, since the GPU {name} is unknown"
    planned = in_a_fork(partial(_plan_resharding, job, known))
    if planned is None:
        return "default", "assumed, since planning failed"
    return planned[0], planned[1]


def _plan_resharding(job: Job, gpu: str) -> tuple[str, str]:
    """Plan for a known GPU, in a fork, since a rehearsal starts threads."""
    from titanlite.observe.progress import waiting
    from titanlite.planner.hardware import load_hardware
    from titanlite.planner.resharding import choose

    try:
        with waiting(f'planning {RESHARD} "never"'):
            return choose(job, load_hardware(gpu))
    except Exception as error:  # a model that cannot be rehearsed may still be trained
        return "default", f"assumed, since planning failed: {first_line(error)}"


def _state_size(job: Job, parts: list[nn.Module], table: ParameterTable, element_size: int) -> int:
    """Return the bytes of parameters, gradients and optimizer state of some parts of a model, with
    `element_size` bytes per number.
    """
    from titanlite.optim import optimizer_bytes, trained_parameters

    elements = 0
    for part in parts:
        for parameter in part.parameters():
            elements += parameter.numel()
            if parameter.requires_grad:  # its gradient
                elements += parameter.numel()
    if place_of_state(job.config) != "device":
        return elements * element_size
    groups = trained_parameters(parts, table, job.spec.blocks, no_decay=())
    return elements * element_size + optimizer_bytes(groups, job.config)
