"""Rules of the model, the optimizer, checkpoints and metrics."""

from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from titanlite.config.optimizer_state import streams_state
from titanlite.config.rules.check import Check, Refusals, Refuse
from titanlite.config.schema import KEYS, JobConfig, is_set
from titanlite.config.section import value_of
from titanlite.config.torchtitan import FLOAT8_CONVERTERS, STATES
from titanlite.config.urls import LEGAL_URLS, is_url, split_url
from titanlite.errors import UserError
from titanlite.registry import (
    ModelDims,
    ModelSpec,
    find_converter,
    get_model,
    get_optimizer,
    get_sink,
)
from titanlite.registry.lora import Adapters
from titanlite.registry.register import import_package

_FOLDERS = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)
_OTHER_FILES = (
    "logs config.toml environment.json metrics.jsonl events.jsonl run_id report.html previous "
    "profile mlruns wandb .titanlite.lock .saved"
).split()
"""Other names in the dump folder: of a run, `titanlite profile`, `report`, W&B and MLflow."""
_PATHS = (
    *("job.dump_folder", *_FOLDERS, "model.hf_assets_path", "checkpoint.initial_load_path"),
    *("training.dataset_path", "validation.dataset_path"),
)
_MAY_BE_URLS = (
    *("checkpoint.folder", "checkpoint.initial_load_path", "training.dataset_path"),
    *("validation.dataset_path", "training.mixture"),
)
_STORES = ("s3://", "gs://", "az://")
_URLS_SO_FAR = (
    "an object store can be checkpoint.folder, and "
    "`titanlite checkpoint cp URL FOLDER` copies from one, also a Hugging Face folder"
)
_LONGEST_NAME = 255  # bytes
_MAY_BE_0 = ("experts", "dense_layers")


def apply_rules(check: Check, plain: JobConfig, spec: ModelSpec | None, model: Any) -> None:
    """Apply the rules of this file; `plain` has defaults for invalid fields."""
    config = check.config
    check.apply(_the_model_allows_the_keys, plain, spec, model)
    check.apply(_adapters_fit, config, spec, model)
    check.apply(_names_are_registered, config, spec)
    check.apply(_optimizer_has_the_keys, config, spec)
    check.apply(_schedule_fits_the_steps, config)
    check.apply(_precisions_agree, config)
    check.apply(_folders_are_inside_the_dump_folder, config)
    check.apply(_paths_can_exist, config)
    check.apply(_a_stop_has_time_to_save, config)
    check.apply(_state_names_are_known, config)
    check.apply(_stores_are_legal, config)
    check.apply(_hugging_face_knows_the_model, config, spec)
    check.apply(_hugging_face_has_the_biases, config, model)
    check.apply(_traces_fit_between_their_steps, config)


def find_spec(refuse: Refuse, config: JobConfig) -> ModelSpec | None:
    """Return the registered model."""
    key = "model.package"
    try:
        import_package(config.model.package)
        key = "model.name"
        return replace(get_model(config.model.name), adapters=Adapters.of(config.lora))
    except UserError as error:
        refuse(key, f"{error}")
    return None


def find_model(
    refuse: Refuse, config: JobConfig, spec: ModelSpec
) -> tuple[ModelSpec, Any, ModelDims] | None:
    """Return the spec of the flavor, the flavor with its overrides, and its dimensions."""
    flavor = config.model.flavor
    overrides = config.model.overrides
    is_legal = flavor in spec.flavors or (flavor == "hf" and overrides)
    key = "model.overrides" if is_legal else "model.flavor"
    try:
        model = spec.configure(flavor, overrides)
        spec = spec.of(model)
        shape = spec.shape(model)
        sizes = asdict(shape).items()
        empty = []
        for name, size in sizes:
            if size < 1 and name not in _MAY_BE_0:
                empty.append(f"{name} {size}")
        if empty:
            raise UserError(f"the model would have {', '.join(empty)}; sizes are at least 1")
        return spec, model, shape
    except UserError as error:
        refuse(key, f"{error}")
    except ZeroDivisionError:
        refuse(key, "a size of the model is 0; sizes are at least 1")
    return None


def _the_model_allows_the_keys(config: JobConfig, spec: ModelSpec, model: Any) -> Refusals:
    for key, why in spec.limits(model).items():
        if is_set(config, key):
            yield key, f"{spec.name}: {why}"


def _adapters_fit(config: JobConfig, spec: ModelSpec, model: Any) -> Refusals:
    if not spec.adapters:
        return
    legal = replace(spec.adapters, patterns=("*",)).bases(spec.rules(model))
    if not legal:
        yield "lora.rank", f"{spec.name} has no column or row matrices, which have adapters"
        return
    if not spec.adapters.patterns:
        yield "lora.patterns", "no matrix has an adapter, so nothing is trained"
    for pattern in spec.adapters.patterns:
        if not any(fnmatchcase(path, pattern) for path in legal):
            yield "lora.patterns", f'"{pattern}" matches no matrix; there is {", ".join(legal)}'
    if config.model.freeze:
        yield "model.freeze", "lora.rank freezes all but its adapters; remove one of them"
    if config.quantize.linear.float8.enable:
        why = "float8 converts no layer with an adapter (lora.rank)"
        yield "quantize.linear.float8.enable", why
    if config.lora.dropout and config.parallelism.tensor_parallel_degree > 1:
        why = "the ranks of tensor parallel would drop other inputs each; legal: 0"
        yield "lora.dropout", why


def _names_are_registered(config: JobConfig, spec: ModelSpec) -> Refusals:
    """Check names that model.package may register, which has been imported."""
    converters = []
    for name in config.model.converters:
        if name in FLOAT8_CONVERTERS:
            name = "float8"
        converters.append(name)
    for key, names, find in (
        ("model.converters", converters, find_converter),
        ("metrics.sinks", config.metrics.sinks, get_sink),
    ):
        for name in names:
            try:
                find(name)
            except UserError as error:
                yield key, str(error)


def _optimizer_has_the_keys(
    config: JobConfig, spec: ModelSpec
) -> Refusals:  # once model.package is imported
    try:
        optimizer = get_optimizer(config.optimizer.name, config.model.package)
    except UserError as error:
        yield "optimizer.name", str(error)
        return
    for name in optimizer.unused:
        if getattr(config.optimizer, name) != KEYS[f"optimizer.{name}"].default:
            yield (
                f"optimizer.{name}",
                f"{optimizer.name} does not use this key; remove it, or use AdamW",
            )
    settings = config.optimizer
    if settings.state_dtype == "float32" and config.training.dtype == "float64":
        why = "keeps less than the parameters in float64 (training.dtype)"
        yield "optimizer.state_dtype", f'{why}; use "like_parameters"'
    if settings.state_on != "device" and settings.state_dtype == "bfloat16":
        why = f'is for state on the device, and optimizer.state_on = "{settings.state_on}"'
        yield "optimizer.state_dtype", f'{why}; use "like_parameters"'
    elif streams_state(config) and not optimizer.elementwise:
        key = "state_dtype" if settings.state_on == "device" else "state_on"
        yield f"optimizer.{key}", f'"{getattr(settings, key)}" is for AdamW and Adam'
    if settings.state_on != "disk":
        return
    if not settings.state_folder:
        yield "optimizer.state_folder", "name a folder on each node's own disk"
    if config.checkpoint.enable and config.checkpoint.async_mode != "disabled":
        why = 'would copy the state that is on a disk into memory; use "disabled"'
        yield "checkpoint.async_mode", why


def _schedule_fits_the_steps(config: JobConfig) -> Refusals:
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    warmup = schedule.warmup_steps
    decay = 0
    if schedule.decay_ratio:
        decay = round(total * schedule.decay_ratio)
    if schedule.decay_ratio and warmup + decay > total:
        legal = f"at most {max(0, total - warmup) / total:.3g}"
        yield (
            "lr_scheduler.decay_ratio",
            f"{warmup} warm-up steps and {decay} decay steps exceed {total}; {legal}",
        )
    if schedule.decay_ratio and not decay:
        legal = f"0.0 for no decay, or at least {1 / total:.2g}"
        yield "lr_scheduler.decay_ratio", f"rounds to no steps of decay, of {total}; legal: {legal}"


def long_warmup(config: JobConfig) -> str:
    """Return a line about a warm-up that the run does not finish, or an empty string."""
    schedule = config.lr_scheduler
    steps = min(config.training.steps, schedule.total_steps or config.training.steps)
    if schedule.warmup_steps <= steps:
        return ""
    rises = f"the learning rate rises in all {steps} steps"
    if steps == 1:
        rises = "its only step has a low learning rate"
    return f"lr_scheduler.warmup_steps = {schedule.warmup_steps} is longer than the run: {rises}"


def _precisions_agree(config: JobConfig) -> Refusals:
    training = config.training
    for name in ("mixed_precision_param", "mixed_precision_reduce"):
        if (training.dtype == "float64") != (getattr(training, name) == "float64"):
            why = (
                f'training.dtype is "{training.dtype}": '
                'use "float64" for all three types or for none of them'
            )
            yield f"training.{name}", why


def _folders_are_inside_the_dump_folder(config: JobConfig) -> Refusals:
    taken: dict[tuple[str, ...], str] = {}
    for name in _OTHER_FILES:
        taken[(name,)] = f"{name} of a run"
    for key in _FOLDERS:
        path = value_of(config, key)
        if key == "checkpoint.folder" and is_url(path):
            continue
        folder = PurePosixPath(path)
        parts = folder.parts
        if not folder.name or folder.is_absolute() or ".." in parts:
            yield key, "must be the name of a folder inside job.dump_folder"
        for other, owner in taken.items():
            if other[: len(parts)] == parts[: len(other)]:
                yield key, f"must differ from {owner}, and neither may contain the other"
        taken[parts] = key


def _paths_can_exist(config: JobConfig) -> Refusals:
    paths = [(key, value_of(config, key)) for key in _PATHS]
    paths += [("training.mixture", source.dataset_path) for source in config.training.mixture]
    for key, path in paths:
        longest = max(len(name.encode()) for name in path.split("/"))
        if longest > _LONGEST_NAME:
            yield key, f"a name of {longest} bytes; files and folders have at most {_LONGEST_NAME}"
        if "\0" in path:
            yield key, "the zero character cannot be in a path"
        if path.startswith(_STORES) and key not in _MAY_BE_URLS:
            yield key, f"must be a folder here; {_URLS_SO_FAR}"
    if not config.job.dump_folder:
        yield "job.dump_folder", 'must be the name of a folder; "." is the current one'


def _a_stop_has_time_to_save(config: JobConfig) -> Refusals:
    fault = config.fault
    if config.checkpoint.enable and 0 < 60 * fault.stop_after_minutes <= fault.grace_seconds:
        grace = f"{fault.grace_seconds / 60:g} minutes of it (fault.grace_seconds)"
        yield "fault.stop_after_minutes", f"the last {grace} are for saving; it must be more"


def _state_names_are_known(config: JobConfig) -> Refusals:
    for name in config.checkpoint.exclude_from_loading:
        if name in STATES:
            yield "checkpoint.exclude_from_loading", f'"{name}" {STATES[name]}'


def _stores_are_legal(config: JobConfig) -> Refusals:
    settings = config.checkpoint
    urls = {name: getattr(settings, name) for name in ("folder", "initial_load_path")}
    urls = {name: url for name, url in urls.items() if is_url(url)}
    for name, url in urls.items():
        if not split_url(url):
            yield f"checkpoint.{name}", f"legal: {LEGAL_URLS}"
    if "folder" in urls and settings.last_save_in_hf:
        why = "needs checkpoint.folder here; `titanlite checkpoint export URL FOLDER` does it later"
        yield "checkpoint.last_save_in_hf", why
    if "initial_load_path" in urls and settings.initial_load_in_hf:
        why = "a Hugging Face folder must be here: `titanlite checkpoint cp URL FOLDER` copies it"
        yield "checkpoint.initial_load_path", why


def _hugging_face_knows_the_model(config: JobConfig, spec: ModelSpec) -> Refusals:
    settings = config.checkpoint
    for name in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(settings, name) and spec.hf is None:
            remedy = (
                "`titanlite checkpoint export --format safetensors` writes "
                "plain files of any model's checkpoint"
            )
            yield f"checkpoint.{name}", f"{spec.name} has no Hugging Face names; {remedy}"
    if settings.initial_load_in_hf and not settings.initial_load_model_only:
        yield (
            "checkpoint.initial_load_model_only",
            "a Hugging Face folder contains weights only; use true",
        )


def _hugging_face_has_the_biases(config: JobConfig, model: Any) -> Refusals:
    if config.checkpoint.last_save_in_hf and getattr(model, "balance", "") == "bias":
        remedy = (
            'use model.overrides.balance = "sequence" or "none", '
            "or export checkpoints as plain safetensors"
        )
        yield (
            "checkpoint.last_save_in_hf",
            f'Hugging Face has no biases of routers (balance = "bias"); {remedy}',
        )


def _traces_fit_between_their_steps(config: JobConfig) -> Refusals:
    profiling = config.profiling
    warmup = profiling.profiler_warmup
    active = profiling.profiler_active
    period = profiling.profile_freq
    if profiling.enable_profiling and period < warmup + active:
        why = f"{warmup} warm-up steps and {active} traced steps do not fit into {period}"
        yield "profiling.profile_freq", f"{why}; at least {warmup + active}"
