"""Rules of data sets, batches and sequence lengths."""

from titanlite.config.layout import Batch, Layout
from titanlite.config.needs import is_streamed
from titanlite.config.rules.check import Check, Refusals, Refuse
from titanlite.config.schema import JobConfig, Training, Validation
from titanlite.config.urls import COPY_FIRST, LEGAL_URLS, is_url, split_url
from titanlite.registry import ModelDims

BYTE_VOCABULARY = 256
"""Tokens of the built-in byte tokenizer."""


def apply_rules(check: Check, layout: Layout | None, shape: ModelDims | None) -> None:
    """Apply the rules of this file."""
    config = check.config
    check.apply(_sequences_fit_the_model, config, shape)
    check.apply(_chunks_have_tokens, config, layout)
    check.apply(_byte_tokenizer_fits_the_vocabulary, config, shape)
    check.apply(_data_sets_have_paths, config)
    check.apply(_streams_have_limits, config)
    check.apply(_mixtures_add_up, config)


def find_batch(refuse: Refuse, config: JobConfig, layout: Layout) -> Batch | None:
    """Return the samples of a step; refuse a global batch that is not a multiple of the smallest
    one.
    """
    local = config.training.local_batch_size
    total = config.training.global_batch_size
    unit = local * layout.data_parallel
    if total == -1 or total % unit == 0:
        return Batch(local, layout.data_parallel, max(1, total // unit))
    below = total // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    factors = f"local_batch_size {local} x data-parallel degree {layout.data_parallel}"
    why = f"must be a multiple of {factors} = {unit}; nearest: {nearest}"
    refuse("training.global_batch_size", why)
    return None


def _sequences_fit_the_model(config: JobConfig, shape: ModelDims) -> Refusals:
    for section in ("training", "validation"):
        if (getattr(config, section).seq_len or 0) > shape.max_seq_len:
            why = f"the model has positions for {shape.max_seq_len} tokens at most"
            yield f"{section}.seq_len", why


def _chunks_have_tokens(config: JobConfig, layout: Layout) -> Refusals:
    shortest = config.training.seq_len
    if config.validation.enable and config.validation.seq_len:
        shortest = min(shortest, config.validation.seq_len)
    shortest //= layout.cp
    if config.training.loss_chunks > shortest:
        tokens = f"{shortest} tokens on a rank" if layout.cp > 1 else f"{shortest} tokens"
        yield "training.loss_chunks", f"a sequence has {tokens}; at most {shortest}"


def _byte_tokenizer_fits_the_vocabulary(config: JobConfig, shape: ModelDims) -> Refusals:
    model = config.model
    if any(part.dataset == "tokens" for part in config.training.sources):
        return  # token shards bring a tokenizer or need none
    if not model.hf_assets_path and shape.vocab_size < BYTE_VOCABULARY:
        why = "must be a folder with a tokenizer.json: the byte tokenizer's "
        why += f"{BYTE_VOCABULARY} tokens do not fit {model.name} {model.flavor} "
        yield "model.hf_assets_path", f"{why}with its vocabulary of {shape.vocab_size}"


def _data_sets_have_paths(config: JobConfig) -> Refusals:
    sections: dict[str, Training | Validation] = {"training": config.training}
    if config.validation.enable:
        sections["validation"] = config.validation
    for name, section in sections.items():
        why = _path_fault(section.dataset, section.dataset_path)
        if why:
            yield f"{name}.dataset_path", why


def _path_fault(name: str, path: str) -> str:
    """Return the fault of a data set's dataset_path, or an empty string."""
    if name in ("text", "tokens", "chat") and not path:
        return f'the data set "{name}" needs a folder or file in dataset_path'
    if name.startswith("python-stdlib") and path:
        return f'the data set "{name}" has no path; remove dataset_path = "{path}"'
    if not is_url(path):
        return ""
    if name != "tokens":
        return COPY_FIRST
    if not split_url(path):
        return f"legal: a folder here, or {LEGAL_URLS}"
    return ""


def _streams_have_limits(config: JobConfig) -> Refusals:
    training = config.training
    for number, part in enumerate(training.mixture, 1):
        if is_streamed(part.dataset):
            why = f'"{part.dataset}" is streamed, and a mixture needs random access to its sources'
            yield "training.mixture", f"entry {number}: {why}; download it and use text, or tokens"
    datasets = {}
    if not training.mixture:
        datasets["training"] = training.dataset
    if config.validation.enable:
        datasets["validation"] = config.validation.dataset
    found = [(section, name) for section, name in datasets.items() if is_streamed(name)]
    if found and training.packing == "first-fit":
        section, name = found[0]
        why = (
            "first-fit needs all documents before the first window, and "
            f'{section}.dataset = "{name}" is streamed'
        )
        yield (
            "training.packing",
            f'{why}; use "concatenate", with document_mask if documents must not see each other',
        )
    for section, name in found:
        why = f'{section}.dataset = "{name}" is streamed: it repeats, and its length is unknown'
        if section == "training" and not training.repeat:
            yield "training.repeat", f"{why}; prepare it, or use true"
        if section == "validation" and config.validation.steps == -1:
            yield "validation.steps", f"{why}; name a number of steps"


def _mixtures_add_up(config: JobConfig) -> Refusals:
    training = config.training
    parts = training.mixture
    if not parts:
        return
    weights = [part.weight for part in parts]
    if any(round(weight, 4) != weight for weight in weights):
        yield "training.mixture", "weights must be multiples of 0.0001"
    elif round(sum(weights), 9) != 1:
        yield (
            "training.mixture",
            f"weights must add up to 1, not {' + '.join(map(str, weights))} = {sum(weights):g}",
        )
    for number, part in enumerate(parts, 1):
        why = _path_fault(part.dataset, part.dataset_path)
        if why:
            yield "training.mixture", f"entry {number}: {why}"
