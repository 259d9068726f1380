"""Rules of [quantize.linear.float8] that need no model; parallel/float8.py decides which layers are converted."""

from __future__ import annotations

from titanlite.config.rules.context import Faults, RuleContext


def _can_multiply(judge: RuleContext) -> Faults:
    float8, training = judge.config.quantize.linear.float8, judge.config.training
    if not float8.enable:
        return
    if training.mixed_precision_param == "float64":
        yield "quantize.linear.float8.enable", "products of float8 come out in float32 or bfloat16, not in float64"
    tokens = training.local_batch_size * training.seq_len
    if tokens % 16 and float8.recipe_name != "rowwise_with_gw_hp" and not float8.emulate:
        yield (
            "quantize.linear.float8.enable",
            f"a weight's gradient sums over training.local_batch_size x training.seq_len = {tokens} tokens, and "
            "GPUs multiply float8 in steps of 16; change one of them",
        )


def _can_be_gathered(judge: RuleContext) -> Faults:
    float8, section = judge.config.quantize.linear.float8, "quantize.linear.float8."
    if not float8.enable:
        return
    gathers, precomputes = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
    if float8.enable_fsdp_float8_all_gather:
        if float8.recipe_name != "tensorwise":
            why = f'a shard does not know the rows of others: "{float8.recipe_name}" is gathered in high precision'
            yield section + gathers, f'{why}; leave it out, or use recipe_name = "tensorwise"'
        if judge.layout.fsdp == 1:
            yield section + gathers, "every parameter is whole on every rank already; leave it out"
        if isinstance(judge.config.parallelism.fsdp_reshard_after_forward, int):
            why = "what is kept sharded over some ranks is no float8 any more"
            yield "parallelism.fsdp_reshard_after_forward", f'{why}; use "always" or "never" with {section}{gathers}'
    if float8.precompute_float8_dynamic_scale_for_fsdp:
        if not float8.enable_fsdp_float8_all_gather:
            yield section + precomputes, f"it is for what is gathered in float8; set {section}{gathers}"
        if judge.config.training.enable_cpu_offload:
            yield section + precomputes, "a scale is lost in the copy from host memory; use it or enable_cpu_offload"


RULES = (_can_multiply, _can_be_gathered)
