"""Every private name of torch and torchao that titanlite uses, once each.

No other file uses private names, except planner/torch_private.py. Each entry
lists the versions it was tried on, and the public replacement if there is one. Slow imports are
deferred, so that any file may import this one.
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

# torch 2.11, 2.13 and 2.15. These operations have no public names; TorchTitan lists them too.
ATTENTION_OPERATIONS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
# torch 2.11, 2.13 and 2.15: the operation behind DTensor's reduce-scatter has no public name.
REDUCE_SCATTER_OPERATION = torch.ops._c10d_functional.reduce_scatter_tensor.default
INDUCTOR_MODULE = "torch._inductor.compile_fx"
"""Preloaded by pools whose runs compile: torch.compile imports it in every new rank, which takes
seconds. torch 2.11, 2.13 and 2.14."""


def flash_from_last(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Compute causal attention for the last tokens with FlashAttention-2, in 16 bits, without a
    mask.
    """
    # torch 2.11, on an H100. torch.nn.attention.bias.causal_lower_right calls it, but its Tensor
    # subclass breaks compiled blocks and recomputation by operation. Grouped keys and values need
    # no expansion.
    flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
    return flash_attention(q, k, v, dropout, is_causal=True)[0]


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether torch chooses cuDNN's attention here, as it does on Hopper in 16 bits."""
    # torch 2.11 and 2.14. The public can_use_cudnn_attention only tells whether it could.
    q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return torch._fused_sdp_choice(q, q, q, is_causal=True) == SDPBackend.CUDNN_ATTENTION.value


Attended = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]
"""Values, logsumexp of the scores (batch, heads, tokens, 1), and what else the kernel saves."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Attended:
    """Compute attention with cuDNN's kernel, or the CPU's."""
    # torch 2.11 on an H100, and 2.14. The public function calls it, but does not return the
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


def foreach_div_(tensors: list[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divide each tensor by a scalar on the device, in one kernel."""
    # torch 2.11, 2.13 and 2.14. The public clip_grads_with_norm_ multiplies, and is slow for
    # DTensors.
    if tensors:
        torch._foreach_div_(tensors, divisor.to(tensors[0].device))


def put_tensor(owners: Sequence[tuple["nn.Module", str]], tensor: torch.Tensor) -> None:
    """Let modules' attributes, which are parameters, be a tensor that need not be one.

    torch 2.14; torch.func.functional_call is the public way, and slow (param_view.py).
    """
    for module, attribute in owners:
        module._parameters[attribute] = tensor  # type: ignore[assignment]


def shard_at(tensor: "DTensor", coordinate: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape of the shard at a mesh coordinate, and its offset in the full tensor."""
    return _shard_at(
        tuple(tensor.shape), tensor.device_mesh.shape, tuple(coordinate), tensor.placements
    )


@lru_cache(maxsize=1024)  # 0.3 ms each, for thousands of tensors with few different shapes
def _shard_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: Any
) -> tuple[Sequence[int], Sequence[int]]:
    # torch 2.14; 2.11 read only. The public API gives the shape of this rank's only. It computes
    # with tensors, which are real in a rehearsal too.
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        return _compute_local_shape_and_global_offset(shape, mesh, [*coordinate], placements)


def shard_offset(tensor: "DTensor") -> tuple[int, ...]:
    """Return the offset of this rank's shard in the full tensor."""
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
    """A gloo group with one thread instead of two. Unless groups connect lazily, all of them share
    their devices: each device has a thread that polls a hundred times a second, even after its
    group has ended.
    """

    devices: list[Any] = []

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack the names
        # A lazily connecting device serves one group; ranks of a second one would wait forever.
        connects_late = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "0"
        devices = [] if connects_late else self.devices
        if not devices:
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
            if interfaces:
                names = interfaces.split(",")
                devices += [gloo.create_device(interface=name) for name in names]
            else:
                devices.append(gloo.create_default_device())
        options = gloo._Options()
        options._devices = devices
        options._threads = 1
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def give_gloo_groups_one_thread() -> None:
    """Make gloo groups use one thread from now on, since two corrupt the heap."""
    # torch 2.14: both assign the name of the last collective to one string without a lock; the name
    # of DTensor's gathers is long enough to be on the heap. torch creates groups by this name, and
    # ignores a caller's options.
    vars(dist.distributed_c10d)["ProcessGroupGloo"] = _Gloo


def flight_record() -> bytes:
    """Return NCCL's record of this process's last collectives, even during one."""
    # torch 2.14, and 2.15, where "nccl" is another implementation; 2.11 only read. No public name.
    c10d: Any = torch._C._distributed_c10d
    try:
        return c10d._dump_fr_trace(True, True, False, backend="nccl2")
    except TypeError:  # until 2.14
        return c10d._dump_nccl_trace()


def nccl_implementation() -> str:
    """Return the name of torch's NCCL class; 2.15 has two."""
    # torch 2.14; 2.15 only read. No public name.
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    return type(backend).__name__


@contextmanager
def share_reshard_meshes() -> Iterator[None]:
    """Make fully_shard create one mesh for reshard_after_forward = n, instead of one with two
    communicators for each group.
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
    """Let inductor split matrix products to overlap them with the group's communication."""
    # torch 2.11 and 2.13, only read (no GPU). The first has no public name. The second is
    # deprecated in 2.13, where inductor still calls is_symm_mem_enabled_for_group before it fuses;
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
    # A device mesh in a graph has no size.
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        config.unsafe_treat_script_objects_as_zero_size = True


def round_between_fused_operations() -> None:
    """Make inductor round between the operations that it fuses, as uncompiled code does."""
    # torch 2.11 and 2.13, not yet run on a GPU; no public name.
    from torch._inductor import config

    config.emulate_precision_casts = True


def accumulate_gradients(part: "nn.Module") -> None:
    """Add the gradients of gathered parameters to those that FSDP2 accumulates in its reduction
    type.
    """
    # torch 2.11, 2.13, 2.14 and 2.15; since 2.14 a module may have several parameter groups. FSDP2
    # itself does this in hooks of the backward pass.
    from torch.distributed.fsdp import FSDPModule

    for module in part.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if not groups:  # until 2.13
                groups = filter(None, [state._fsdp_param_group])
            for group in groups:
                if hasattr(group, "_set_unsharded_grad_dtypes"):  # 2.15
                    group._set_unsharded_grad_dtypes(defer_upcast=False)
                    continue
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()


def begin_backward(module: "nn.Module") -> None:
    """Run FSDP2's hook for the start of a module's backward pass, so that it does not mistake a
    recomputed forward pass for a new one.
    """
    # torch 2.11 and 2.14. FSDP2 calls this hook when the gradients of the module's outputs exist.
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    state._pre_backward(torch.empty(0))


def is_recomputing() -> bool:
    """Return whether this forward pass is a recomputation, inside a backward pass."""
    # torch 2.11 and 2.14; activation checkpointing itself checks this.
    return torch._C._current_graph_task_id() != -1


def keep_buffers_of_compiled_graphs() -> None:
    """Let a backward pass run in two halves that both read a compiled graph's saved tensors."""
    # torch 2.11 and 2.14, only read (it takes a GPU: FlexAttention's graph needs it). TorchTitan
    # does this for DualPipeV.
    from torch._functorch import config

    config.donated_buffer = False


def send_nothing_to_this_rank(stage: Any) -> None:
    """Drop sends to this rank itself, which gloo can't do, from a stage's first sends to all
    neighbors.
    """
    # torch 2.11, 2.13 and 2.14. 2.11 needs it: a rank is its own neighbor in the middle of a V.
    # 2.15 has no such sends.
    operations = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if operations:
        to_others = lambda: [each for each in operations() if each.peer != dist.get_rank()]  # noqa: E731
        stage._get_init_p2p_neighbors_ops = to_others


def default_all_gather() -> type:
    """Return the class of FSDP2's own all-gather, for set_custom_all_gather. torch 2.11 and 2.13;
    no public name.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    return DefaultAllGather


def gather_float8_as_bytes() -> None:
    """Make DTensor gather torchao's float8 tensors as bytes, for backends without that type."""
    # torchao 0.18. There is no other way to change a collective inside DTensor's redistribution.
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    def all_gather(
        operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        shard = args[0]
        options = kwargs or {}
        data = shard._data.contiguous()
        gathered = torch.ops._c10d_functional.wait_tensor(
            operation(data.view(torch.uint8), *args[1:], **options)
        )
        fields = shard._scale, shard._orig_dtype, shard._linear_mm_config, shard._gemm_input_role
        return type(shard)(gathered.view(data.dtype), *fields)

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = all_gather


def unwrap_float8_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside torchao's class for weights gathered in float8, or any other tensor
    unchanged.
    """
    # torchao 0.18; no public way.
    if type(weight).__module__ == "torchao.float8.fsdp_utils":
        return weight._tensor  # type: ignore
    return weight


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process, without importing anything."""
    # torch 2.11, 2.13 and 2.15. torch.compiler has no counter.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo:
        return dynamo.counters["stats"]["unique_graphs"]
    return 0


def record_memory_history(enable: bool) -> None:
    """Keep the GPU allocator's last 100,000 events, or stop doing so."""
    # torch 2.11 and 2.13, not yet run on a GPU. PyTorch's documentation uses this function and the
    # next.
    kept = "all" if enable else None
    torch.cuda.memory._record_memory_history(kept, max_entries=100_000)


def dump_memory_snapshot(path: Path) -> None:
    """Write the recorded events to a file for pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))
