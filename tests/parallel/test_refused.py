"""What techniques cannot do is refused before a run starts, by its key and value, with what is
legal.
"""

import pytest

from tests.jobs import PARROT, TINY, job
from tests.messages import refused
from tests.parallel.rows import (
    CHUNKS,
    CP,
    EVEN,
    LORA,
    OFFLOADED,
    RECOMPUTED,
    RESHARD,
    TP,
    ULYSSES,
    UNBALANCED,
)
from titanlite.config.load import ConfigError

BUDGET = f"{RECOMPUTED}memory_budget"
ENABLE, LOSS_ONLY = "--compile.enable", "--compile.enable --compile.components=['loss']"
SEQUENCE, VALIDATION = "--training.seq_len=", "--validation.enable --validation.seq_len="
HEADS, FLOAT8 = "--model.overrides.n_kv_heads=1", "--quantize.linear.float8.enable"
CP3 = "--parallelism.context_parallel_degree=3"
ROTATE = "--parallelism.context_parallel_rotate_method="
COMPILE = "set compile.enable"
ROWS = [
    # Context parallel.
    (EVEN, 2, f"{CP} {SEQUENCE}6", ("2 does not divide 6", "legal: 1")),
    (EVEN, 4, f"{CP} {TP} {SEQUENCE}18", ("tensor_parallel_degree 2", "legal: 1")),
    (EVEN, 8, f"{CP3} {TP} {SEQUENCE}64", ("64 tokens", "legal: 1, 2, 4")),
    (EVEN, 2, f"{CP} {SEQUENCE}15 {UNBALANCED}", ("2 does not divide 15", "legal: 1")),
    (EVEN, 2, f"{CP} {VALIDATION}6", ("6 tokens", "validation sequence")),
    (EVEN, 2, f"{CP} {ULYSSES} {HEADS}", ("1 key and value heads", "legal: 1")),
    (PARROT, 2, CP, ("parrot", "ModelSpec")),
    (EVEN, 2, f"{CP} {CHUNKS}9", ("loss_chunks", "8 tokens", "at most 8")),
    (EVEN, 2, f"{CP} {FLOAT8} --training.local_batch_size=1", ("context_parallel_degree = 8",)),
    (EVEN, 2, f"{CP} {UNBALANCED[:-4]}ptrr", ("ptrr", "FlexAttention")),
    (EVEN, 2, f"{CP} {ROTATE}alltoall", ('"allgather", "ulysses"', "alltoall")),
    # Tensor parallel.
    (EVEN, 8, f"{TP} {RESHARD}2", ('use "always"',)),
    (EVEN, 2, f"{TP} {HEADS}", ("1 key and value heads", "legal: 1")),
    (EVEN, 2, f"{TP} {SEQUENCE}15", ("2 does not divide 15 tokens",)),
    (EVEN, 2, f"{TP} {VALIDATION}15", ("2 does not divide 15", "validation sequence")),
    # A budget of memory, parameters kept whole, and float16.
    (TINY, 1, BUDGET, (COMPILE,)),
    (TINY, 1, f"{BUDGET} {LOSS_ONLY}", (COMPILE,)),
    (TINY, 1, f"{BUDGET} {ENABLE} --compile.backend=eager", ('use "inductor" or "aot_eager"',)),
    (TINY, 2, f"--parallelism.fsdp_keep_whole=['norm.*'] {OFFLOADED}", ("fsdp_keep_whole",)),
    (TINY, 1, "--training.dtype=float16", ("training.dtype", "loss scaling")),
    (TINY, 1, "--training.mixed_precision_param=float16", ("mixed_precision_param",)),
    (TINY, 1, "--training.mixed_precision_reduce=float16", ("mixed_precision_reduce",)),
    # Chunks of the loss.
    (TINY, 1, f"{CHUNKS}17", ("training.loss_chunks = 17", "16 tokens", "at most 16")),
    (TINY, 1, f"{CHUNKS}9 {VALIDATION}8", ("training.loss_chunks = 9", "at most 8")),
    # Adapters.
    (LORA, 2, "--lora.patterns=['*.w9']", ("*.w9", "layers.*.attention.wq")),
    (LORA, 2, "--lora.patterns=[]", ("lora.patterns", "no matrix")),
    (LORA, 2, "--model.freeze=['output.*']", ("model.freeze", "adapters")),
    (LORA, 2, f"{TP} --lora.dropout=0.1", ("lora.dropout = 0.1", "legal: 0")),
    (LORA, 2, FLOAT8, ("float8", "adapter")),
]


@pytest.mark.parametrize(("model", "world", "words", "said"), ROWS, ids=[row[2] for row in ROWS])
def test_what_techniques_cannot_do_is_refused_with_what_is_legal(model, world, words, said):
    with refused(*said, kind=ConfigError):
        job([*model, *words.split()], world)
