"""Every private name of torch and torchao that titanlite uses, once each.

Promises: no other file names one but verify/pool.py and, for the planner alone,
planner/torch_private.py. Each entry has the versions it was tried on, and the public name to move
to where one exists. Imports are late where they are slow, so that anything may import this file.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor import DTensor

# torch 2.11, 2.13 and 2.15. These operations have no public names; TorchTitan lists the same.
ATTENTION_OPERATIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
# torch 2.11, 2.13 and 2.15: the operation behind DTensor's reduce-scatter has no public name.
REDUCE_SCATTER_OPERATION = torch.ops._c10d_functional.reduce_scatter_tensor.default


def flash_from_last(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Attend causally from the last tokens by FlashAttention-2, in 16 bits, without a mask."""
    # torch 2.11, on an H100: called by torch.nn.attention.bias.causal_lower_right, but its subclass
    # of Tensor breaks compiled blocks and recomputation by operation. It takes fewer heads of keys
    # and values as they are.
    flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
    return flash_attention(q, k, v, dropout, is_causal=True)[0]


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether torch attends by cuDNN here, as it does on Hopper, in 16 bits."""
    # torch 2.11 and 2.14. The public can_use_cudnn_attention says only whether it can.
    q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return torch._fused_sdp_choice(q, q, q, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value


Attended = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]
"""Values, logsumexp of the scores (batch, heads, tokens, 1), and what else a kernel keeps."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Attended:
    """Attend by cuDNN's kernel, or a CPU's."""
    # torch 2.11, called by the public function on an H100, and 2.14. That does not return the
    # logsumexp.
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, is_causal=causal
        )
        return found[0], found[1], found[6:8]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse.unsqueeze(-1), ()


def attention_gradients(
    grad: torch.Tensor, inputs: Sequence[torch.Tensor], attended: Attended, causal: bool
) -> Sequence[torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    out, lse, seeds = attended
    if grad.is_cuda:
        q, k, v = inputs
        lengths = None, None, None, q.size(2), k.size(2)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, *seeds, *lengths, 0.0, causal
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *inputs, out, lse.squeeze(-1), 0.0, causal
    )


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by the factor, in one kernel."""
    # torch 2.11, 2.13 and 2.15. The public clip_grads_with_norm_ does so too, but is slow on a list
    # of DTensors.
    torch._foreach_mul_(tensors, factor)


def shard_at(tensor: "DTensor", coordinate: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape of the shard at a coordinate of the mesh, and where it begins in the full
    tensor.
    """
    return _shard_at(
        tuple(tensor.shape), tensor.device_mesh.shape, tuple(coordinate), tensor.placements
    )


@lru_cache(maxsize=1024)  # a third of a millisecond each, for thousands of tensors of few shapes
def _shard_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: Any
) -> tuple[Sequence[int], Sequence[int]]:
    # torch 2.14; 2.11 read only. The public API gives the shape of this rank's only.
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    return _compute_local_shape_and_global_offset(shape, mesh, [*coordinate], placements)


def shard_offset(tensor: "DTensor") -> tuple[int, ...]:
    """Return where this rank's shard begins in the full tensor."""
    return tuple(shard_at(tensor, tensor.device_mesh.get_coordinate() or ())[1])


def dtensor_like(tensor: "DTensor", local: torch.Tensor) -> "DTensor":
    """Return a DTensor with the mesh and the placements of another, and this shard's memory."""
    # torch 2.11, 2.13 and 2.14. The public from_local copies a shard in host memory to the GPU.
    from torch.distributed.tensor import DTensor

    return DTensor(local, tensor._spec, requires_grad=local.requires_grad)  # type: ignore


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process."""
    # torch 2.11, 2.13 and 2.15; a DeviceMesh lists its own groups only, and FSDP2 creates others.
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


class _Gloo(dist.ProcessGroupGloo):
    """A gloo group with one thread, of the usual two, and, unless it connects late, with the
    devices of all others: a device has a thread that polls a hundred times a second, also after
    its group has ended.
    """

    devices: list[Any] = []

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the names
        # A device that connects late serves one group: two of a second group would wait forever.
        connects_late = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0"
        devices = [] if connects_late else self.devices
        if not devices:
            if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
                names = interfaces.split(",")
                devices += [gloo.create_device(interface=name) for name in names]
            else:
                devices.append(gloo.create_default_device())
        options = gloo._Options()
        options._devices, options._threads, options._timeout = devices, 1, timeout
        super().__init__(store, rank, size, options)


def give_gloo_groups_one_thread() -> None:
    """Make each gloo group from now on with one thread, since two damage the heap."""
    # torch 2.14: they assign the name of the last collective to one string without a lock, and that
    # of DTensor's gathers lies on the heap. torch makes its groups by this
    # name, without the options that a caller gives.
    vars(dist.distributed_c10d)["ProcessGroupGloo"] = _Gloo


def flight_record() -> bytes:
    """Return NCCL's record of this process's last collectives, also while a thread waits for
    one.
    """
    # torch 2.14, and 2.15, whose "nccl" is another implementation; 2.11 read only. No public name.
    c10d: Any = torch._C._distributed_c10d
    try:
        return c10d._dump_fr_trace(True, True, False, backend="nccl2")
    except TypeError:  # until 2.14
        return c10d._dump_nccl_trace()


def nccl_implementation() -> str:
    """Return which class of torch talks to NCCL: 2.15 has two."""
    # torch 2.14; 2.15 read only. No public name.
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    return type(backend).__name__


@contextmanager
def share_reshard_meshes() -> Iterator[None]:
    """Let fully_shard make one mesh for reshard_after_forward = n: its own has two communicators
    for each group.
    """
    # torch 2.14; 2.11 read only. No public name.
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard

    original = _fsdp_init._get_post_forward_mesh_info
    made: dict[Any, Any] = {}

    def once(reshard: bool | int, mesh_info: Any) -> Any:
        key = reshard, mesh_info.mesh
        if key not in made:
            made[key] = original(reshard, mesh_info)
        return made[key]

    modules: tuple[Any, ...] = _fsdp_init, _fully_shard
    for module in modules:
        module._get_post_forward_mesh_info = once
    try:
        yield
    finally:
        for module in modules:
            module._get_post_forward_mesh_info = original


def enable_async_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Let inductor split matrix products into pieces that overlap with the group's
    communication.
    """
    # torch 2.11 and 2.13, read only (no GPU). No public name for the first. The second is
    # deprecated in 2.13, where inductor still calls is_symm_mem_enabled_for_group before it fuses:
    # drop it once that is gone.
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


def set_activation_memory_budget(budget: float) -> None:
    """Set the fraction of activations that graphs compiled from now on may keep; 1.0 means all."""
    # torch 2.11 and 2.13. Move to torch.autograd.graph.region_activation_memory_budget, which 2.11
    # lacks.
    from torch._functorch import config

    config.activation_memory_budget = budget
    if hasattr(
        config, "unsafe_treat_script_objects_as_zero_size"
    ):  # a device mesh in a graph has no size
        config.unsafe_treat_script_objects_as_zero_size = True


def round_between_fused_operations() -> None:
    """Let inductor round between the operations that it fuses, as without compiling."""
    # torch 2.11 and 2.13, not yet run on a GPU; no public name.
    from torch._inductor import config

    config.emulate_precision_casts = True


def accumulate_gradients(part: "nn.Module") -> None:
    """Add gradients of parameters that FSDP2 has gathered to those that it keeps in its type for
    reductions.
    """
    # torch 2.11, 2.13, 2.14 and 2.15; since 2.14 a module may have several groups of parameters.
    # FSDP2 does so in hooks of the backward pass.
    from torch.distributed.fsdp import FSDPModule

    for module in part.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or filter(
                None, [state._fsdp_param_group]
            ):
                if hasattr(group, "_set_unsharded_grad_dtypes"):  # 2.15
                    group._set_unsharded_grad_dtypes(defer_upcast=False)
                    continue
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()


def begin_backward(module: "nn.Module") -> None:
    """Run FSDP2's hook before a module's backward pass; a repeated forward pass then is not taken
    for a new one.
    """
    # torch 2.11 and 2.14. FSDP2 calls this hook for gradients of the module's outputs.
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    state._pre_backward(torch.empty(0))


def is_recomputing() -> bool:
    """Return whether this forward pass is part of a backward pass: a repetition, by activation
    checkpointing.
    """
    # torch 2.11 and 2.14; activation checkpointing itself does so.
    return torch._C._current_graph_task_id() != -1


def keep_buffers_of_compiled_graphs() -> None:
    """Let a backward pass run in two halves that both read the saved tensors of a compiled
    graph.
    """
    # torch 2.11 and 2.14, read only (no GPU: FlexAttention's graph meets it). TorchTitan does so
    # for DualPipeV.
    from torch._functorch import config

    config.donated_buffer = False


def send_nothing_to_this_rank(stage: Any) -> None:
    """Leave out of a pipeline's first sends, to all neighbors of a stage, those to this rank, which
    gloo can't do.
    """
    # torch 2.11, 2.13 and 2.14: needed by 2.11, where a rank is its own neighbor in the middle of a
    # V. 2.15 has none.
    if operations := getattr(stage, "_get_init_p2p_neighbors_ops", None):
        to_others = lambda: [each for each in operations() if each.peer != dist.get_rank()]  # noqa: E731
        stage._get_init_p2p_neighbors_ops = to_others


def default_all_gather() -> type:
    """Return the class of FSDP2's own all-gather, for set_custom_all_gather. torch 2.11 and 2.13;
    no public name.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    return DefaultAllGather


def gather_float8_as_bytes() -> None:
    """Let DTensor gather torchao's float8 tensors as bytes in this process, for backends without
    the type.
    """
    # torchao 0.18. Nothing else reaches a collective inside DTensor's redistribution.
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    def all_gather(
        operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        shard, options = args[0], kwargs or {}
        data = shard._data.contiguous()
        gathered = torch.ops._c10d_functional.wait_tensor(
            operation(data.view(torch.uint8), *args[1:], **options)
        )
        fields = shard._scale, shard._orig_dtype, shard._linear_mm_config, shard._gemm_input_role
        return type(shard)(gathered.view(data.dtype), *fields)

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = all_gather


def unwrap_float8_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside torchao's class for weights that are gathered in float8; any other
    as it is.
    """
    # torchao 0.18; no public way.
    return weight._tensor if type(weight).__module__ == "torchao.float8.fsdp_utils" else weight  # type: ignore


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process; nothing is imported for it."""
    # torch 2.11, 2.13 and 2.15. torch.compiler has no counter.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def record_memory_history(enable: bool) -> None:
    """Keep the GPU allocator's last 100,000 events, or stop doing so."""
    # torch 2.11 and 2.13, not yet run on a GPU. PyTorch's documentation names this function and the
    # next.
    torch.cuda.memory._record_memory_history("all" if enable else None, max_entries=100_000)


def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded events to a file for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))
