"""Seeds: everything random depends on the job's names and numbers, never on a rank's history."""

import hashlib
import os
import secrets

import torch
import torch.distributed as dist


def derive_seed(*parts: str | int) -> int:
    """Return a 63-bit seed derived from names and numbers."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def agree_on_seed(configured: int | None) -> int:
    """Return the configured seed, or one that rank 0 draws for all ranks."""
    seed = [secrets.randbits(31) if configured is None else configured]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]


def reseed(seed: int, step: int, micro_batch: int, *coordinates: int) -> None:
    """Seed dropout for one micro-batch on the rank with these coordinates, so that checkpoints need
    no generator state.
    """
    derived = derive_seed("dropout", seed, step, micro_batch, *coordinates)
    torch.default_generator.manual_seed(derived)
    # torch.manual_seed would format a stack for each kind of device that is not initialized.
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(derived)


def use_deterministic_algorithms() -> None:
    """Make operations without a deterministic implementation an error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
