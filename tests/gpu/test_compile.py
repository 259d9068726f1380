"""Compiled for a GPU (sm_90): blocks, FlexAttention and float8, by Triton and its ptxas, which
takes minutes.
"""

from __future__ import annotations

import json

import pytest

from tests.gpu.test_memory import BLAS, MIB, SIZE, peaks, planned_peak

STEPS = (
    "--compile.enable --training.steps=3 --training.seq_len=256 --training.local_batch_size=2 "
    "--model.overrides.n_layers=2"
)
FLOAT8 = "--quantize.linear.float8.enable"
ROWS = {
    # options, and a kernel that has to be among those launched
    "blocks": ("", "triton:triton_"),
    "recomputed by operation": ("--activation_checkpoint.mode=selective", "triton:triton_"),
    "FlexAttention": ("--training.document_mask", "triton:triton_tem_fused_"),
    "float8": (FLOAT8, "cublasLtMatmul"),
    "float8 by rows": (f"{FLOAT8} --quantize.linear.float8.recipe_name=rowwise", "triton:triton_"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("row", ROWS)
def test_a_step_compiles_for_a_gpu_and_its_kernels_are_launched(train_on_gpus, tmp_path, row):
    options, wanted = ROWS[row]
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    argv = [*STEPS.split(), *options.split()]
    ran = train_on_gpus(tmp_path, 1, argv, seconds=1200, **cache)
    launched = {event.name for event in ran.traces[0].step(3).of("launch")}
    assert any(name.startswith(wanted) for name in launched), launched
    of_triton = {name.removeprefix("triton:") for name in launched if name.startswith("triton:")}
    compiled = {}
    for cubin in tmp_path.glob("triton/*/*.cubin"):
        facts = json.loads(cubin.with_suffix(".json").read_text())
        compiled[facts["name"]] = facts["target"]["arch"]
    assert of_triton and of_triton <= compiled.keys(), of_triton - compiled.keys()
    assert {*compiled.values()} == {90}


PLANNED = {
    "nothing recomputed": (1, ""),
    "recomputed by operation": (2, "--activation_checkpoint.mode=selective"),
    "recomputed": (2, "--activation_checkpoint.mode=full"),
    "a memory budget": (1, "--activation_checkpoint.mode=memory_budget"),
    "the blocks alone": (1, "--compile.components=['model']"),
    "loss in chunks": (1, "--training.loss_chunks=4"),
    "tensor parallel": (2, "--parallelism.tensor_parallel_degree=2"),
    "context parallel": (2, "--parallelism.context_parallel_degree=2"),
    "float8": (1, FLOAT8),
}


@pytest.mark.nightly
@pytest.mark.parametrize("row", PLANNED)
def test_the_planned_peak_of_a_compiled_step_is_that_of_the_allocator(train_on_gpus, tmp_path, row):
    gpus, options = PLANNED[row]
    argv = [*SIZE, "--compile.enable", *options.split()]
    planned = planned_peak(argv, gpus)
    ran = train_on_gpus(tmp_path, gpus, argv, seconds=1200)
    for trace in ran.traces:
        allocated, _ = peaks(trace)
        assert abs(allocated - BLAS - planned) < MIB


MOE = (
    "--config debug_moe.toml --training.global_batch_size=-1 --activation_checkpoint.mode=full "
    "--parallelism.expert_parallel_degree=2 --training.steps=4 --training.seq_len=64"
)


@pytest.mark.nightly
def test_a_compiled_layer_of_experts_is_so_many_launches(train_on_gpus, tmp_path):
    """Recomputed, on two ranks of experts."""
    launches = []
    for layers in (1, 2):
        argv = [*MOE.split(), "--compile.enable", f"--model.overrides.n_layers={layers}"]
        trace = train_on_gpus(tmp_path / f"{layers}", 2, argv, seconds=1200).traces[0].step(3)
        launches.append([len(trace.phase(name).of("launch")) for name in ("forward", "backward")])
    (forward, backward), (more_forward, more_backward) = launches
    assert more_forward - forward <= 52 and more_backward - backward <= 110, launches


@pytest.mark.nightly
def test_a_compiled_step_rounds_the_state_of_a_parameter_by_few_launches(train_on_gpus, tmp_path):
    """Two copies to float32, one kernel for both means, and the optimizer's own; 40 otherwise."""
    argv = [*STEPS.split(), "--optimizer.state_dtype=bfloat16"]
    (trace,) = train_on_gpus(tmp_path, 1, argv, seconds=1200).traces
    parameters = 3 + 2 * 9
    assert len(trace.step(3).phase("optimizer").of("launch")) <= 6 * parameters
