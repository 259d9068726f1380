"""The bound lies above every published speed, and is the largest of its sums.

The recordings are formulas, because asynchronous tensor parallel cannot be rehearsed. `python -m
tests.planner.test_bound` prints the table of docs/planning.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.jobs import QUIET, job
from tests.messages import refused, says
from tests.planner.steps import H100
from tests.runs import ROOT
from titanlite.config.hardware_table import hardware_table
from titanlite.config.layout import Layout
from titanlite.models.llama3 import FLAVORS
from titanlite.planner.hardware import load_hardware
from titanlite.planner.record import Collective, Operation, Recording, add_up
from titanlite.planner.rehearse import record_step
from titanlite.planner.speed import Speed, ranks_in_a_node, speed_of, traffic

SEQUENCE = 8192
EAGER, COMPILED, FLOAT8 = "bfloat16", "bfloat16 compiled", "float8 compiled"


@dataclass(frozen=True)
class Row:
    """A published speed, and what was trained."""

    name: str
    published: float
    """Tokens per second and GPU."""
    flavor: str
    layout: Layout
    batch: int
    """Sequences of a rank in a step, together."""
    precision: str
    recompute: str = "op"
    gpu: str = "h100-96g"

    def __str__(self) -> str:
        return self.name


# From torchtitan's benchmarks/llama3_h100_202412_torchtitan.md and, on H200s,
# llama3-8b_h200_202506_trainy-whitefiber.md.
L8, L128 = Layout(dp_shard=8), Layout(dp_shard=128)
L70, L405 = Layout(dp_shard=32, tp=8), Layout(pp=8, dp_shard=8, tp=8)
B405 = ("405B", L405, 32, FLOAT8, "full")
ROWS = (
    Row("8B, 8 GPUs, eager", 5762, "8B", L8, 2, EAGER),
    Row("8B, 8 GPUs, compile", 6667, "8B", L8, 2, COMPILED),
    Row("8B, 8 GPUs, compile, float8", 8532, "8B", L8, 2, FLOAT8),
    Row("8B, 128 GPUs, eager", 5605, "8B", L128, 2, EAGER),
    Row("8B, 128 GPUs, compile", 6514, "8B", L128, 2, COMPILED),
    Row("8B, 128 GPUs, compile, float8", 8380, "8B", L128, 2, FLOAT8),
    Row("70B, 256 GPUs, float8", 829, "70B", L70, 16, FLOAT8, "full"),
    Row("70B, 256 GPUs, float8, async TP", 876, "70B", L70, 16, FLOAT8, "full"),
    Row("405B, 512 GPUs, float8, 1F1B", 100, *B405),
    Row("405B, 512 GPUs, float8, interleaved", 128, *B405),
    Row("8B, 32 H200, compile, float8", 10938, "8B", Layout(dp_shard=32), 2, FLOAT8, gpu="h200"),
    Row("8B, 64 H200, compile, float8", 10753, "8B", Layout(dp_shard=64), 2, FLOAT8, gpu="h200"),
)


def recording_of(row: Row) -> Recording:
    return Recording([*_operations(row)], {})


def _operations(row: Row) -> Iterator[Operation]:
    """Yield the step of a rank in the middle of the pipeline, or of any rank without one."""
    c, layout = FLAVORS[row.flavor], row.layout
    is_float8, is_whole, recomputes = (
        row.precision == FLOAT8,
        layout.pp == 1,
        row.recompute == "full",
    )
    tokens, gathered = row.batch * SEQUENCE, 1 if is_float8 else 2
    linear = "float8_e4m3fn" if is_float8 else "bfloat16"
    kv_dim = c.n_kv_heads * c.head_dim
    weights = (2 * c.dim * (c.dim + kv_dim) + 3 * c.dim * c.hidden_dim) // layout.tp
    embedding = c.vocab_size * c.dim // layout.tp
    products, scores = 2 * weights * tokens, 4 * tokens * SEQUENCE * c.dim // layout.tp
    every_second = 2 * tokens * c.dim * (kv_dim + c.dim + c.hidden_dim) // layout.tp  # wk, wo, w3
    again = products if recomputes else every_second
    layers = c.n_layers // layout.pp

    def send(phase: str, kind: str, size: int, dimension: str = "dp_shard") -> Operation:
        ranks = getattr(layout, dimension)
        return Operation(phase, 0, collective=Collective(kind, dimension, ranks, "", size))

    def compute(phase: str, flops: float, dtype: str) -> Operation:
        return Operation(phase, 0, int(flops), dtype)

    sequence_parallel = [
        send("", kind, 2 * tokens * c.dim, "tp")
        for kind in ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter")
        if layout.tp > 1
    ]
    if is_whole:
        yield send("embedding", "all-gather", 2 * 2 * embedding)
    for layer in range(layers):
        phase = f"forward {layer}"
        yield send(phase, "all-gather", gathered * weights)
        yield from sequence_parallel
        yield compute(phase, products, linear)
        yield compute(phase, scores, "bfloat16")
    if is_whole:
        yield compute("head", 2 * embedding * tokens, "bfloat16")
        yield compute("backward head", 4 * embedding * tokens, "bfloat16")
        yield send("backward head", "all-gather", gathered * weights)
    for layer in reversed(range(layers)):
        phase = f"backward {layer}"
        if layer and is_whole:  # with a pipeline, parameters stay gathered
            yield send(phase, "all-gather", gathered * weights)
        yield from sequence_parallel * (1 + recomputes)
        yield compute(phase, 2 * products + again, linear)
        yield compute(phase, scores * (2.5 + recomputes), "bfloat16")
        yield send(phase, "reduce-scatter", 4 * weights)
    if is_whole:
        yield send("backward embedding", "reduce-scatter", 4 * 2 * embedding)
    local = (weights * layers + 2 * embedding * is_whole) // layout.dp_shard
    # It reads four float32 numbers a parameter, and writes three.
    yield Operation("optimizer", 0, moved=4 * 7 * local)


def speed(row: Row) -> Speed:
    tokens = row.batch * row.layout.data_parallel * SEQUENCE
    return speed_of(add_up(recording_of(row)), row.layout, load_hardware(row.gpu), tokens)


def table() -> list[str]:
    """Return the table of docs/planning.md."""
    lines = ["| tokens/s and GPU | published | bound | share |", "|---|---|---|---|"]
    for row in ROWS:
        bound = speed(row).tokens_per_gpu
        numbers = f"{row.published:,} | {bound:,.0f} | {row.published / bound:.2f}"
        lines.append(f"| {row.name} | {numbers} |")
    return lines


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_bound_is_above_a_published_speed(row):
    assert speed(row).tokens_per_gpu > row.published


def test_the_page_shows_every_row():
    says((ROOT / "docs/planning.md").read_text(encoding="utf-8"), "\n".join(table()))


@pytest.mark.long
def test_the_formulas_count_what_a_rehearsal_counts(monkeypatch):
    monkeypatch.setitem(FLAVORS, "debugmodel", replace(FLAVORS["debugmodel"], n_layers=2))
    argv = [*QUIET, f"--training.seq_len={SEQUENCE}", "--activation_checkpoint.mode=full"]
    rehearsed_job = job([*argv, "--parallelism.tensor_parallel_degree=2"], 8)
    rehearsed = record_step(rehearsed_job)
    formula = recording_of(Row("", 1, "debugmodel", rehearsed_job.layout, 2, EAGER, "full"))
    assert flops_by_phase(rehearsed) == flops_by_phase(formula)
    # titanlite gathers the embedding and the head apart, and TorchTitan keeps both
    for dimension, gathers, scatters in (("dp_shard", 1, 1), ("tp", 2, 2)):
        for kind, more in (("all-gather", gathers), ("reduce-scatter", scatters)):
            of_formula = number_of(formula, kind, dimension)
            assert number_of(rehearsed, kind, dimension) == of_formula + more, (kind, dimension)


def number_of(recording: Recording, kind: str, dimension: str) -> int:
    return sum(
        n for c, n in recording.collectives().items() if (c.kind, c.dimension) == (kind, dimension)
    )


def flops_by_phase(recording: Recording) -> Counter[str]:
    flops = Counter[str]()
    for operation in recording.operations:
        flops[operation.phase] += operation.flops
    return +flops


def collective(kind: str, dimension: str, ranks: int, size: int = 1600) -> Collective:
    return Collective(kind, dimension, ranks, "bfloat16", size)


@pytest.mark.parametrize(
    ("layout", "found", "in_node", "link", "network"),
    [
        (Layout(dp_shard=16), "all-gather dp_shard 16", 8, 1400, 100),  # 1/2 of it over 8 NICs
        (Layout(dp_shard=16), "all-gather dp_shard 4", 4, 1200, 0),  # resharded to 4 ranks
        (Layout(dp_shard=16), "all-to-all dp_shard 16", 8, 700, 800),
        (Layout(dp_shard=2, tp=8), "all-gather dp_shard 2", 1, 0, 800),  # 1/2 of it over one NIC
        (Layout(dp_shard=2, tp=8), "reduce-scatter tp 8", 8, 1400, 0),
        (Layout(dp_shard=2, tp=8), "broadcast world 16", 8, 1400, 100),
        (Layout(dp_shard=8, tp=4), "all-gather dp_shard 8", 2, 800, 600),
        (Layout(dp_replicate=2, dp_shard=8), "all-reduce dp_replicate 2", 1, 0, 1600),
    ],
)
def test_traffic_follows_from_which_ranks_share_a_node(layout, found, in_node, link, network):
    kind, dimension, ranks = found.split()
    sent = collective(kind, dimension, int(ranks))
    assert ranks_in_a_node(sent, layout, 8) == in_node
    near, far = traffic(sent, layout, 8)
    assert (1600 * near, 1600 * far) == (pytest.approx(link), pytest.approx(network))


def test_the_bound_is_the_largest_of_compute_memory_links_and_network():
    layout = Layout(dp_shard=16)
    size, update = 1 << 40, 10**9
    gather = collective("all-gather", "dp_shard", 16, size)
    steps = [
        Operation("forward 0", 0, 10**12, "bfloat16", 10**6),
        Operation("optimizer", 0, moved=update),
        Operation("forward 0", 0, moved=10**15),  # elementwise, so perhaps fused: in no bound
        Operation("forward 0", 0, collective=gather),
    ]
    found = speed_of(add_up(Recording(steps, {})), layout, H100, 1)
    near = size * 7 / 8 / 450e9
    assert {term.resource: term.seconds for term in found.terms} == pytest.approx(
        {
            "compute": 1e12 / 989e12,
            "GPU memory": (10**6 + update) / 3350e9,
            "node link": near,
            "network": size / 2 / 8 / 50e9,
        }
    )
    assert found.binding == "node link" and found.bound == pytest.approx(near)
    reduced = collective("all-reduce", "dp_shard", 16, size)
    steps = [Operation("backward 0", 0, collective=reduced)]
    once = speed_of(add_up(Recording(steps, {})), layout, H100, 8000)
    assert once.bound == pytest.approx(near), "a switch can reduce"
    assert once.tokens_per_gpu == pytest.approx(500 / near)
    assert once.days(8000 * 86400) == pytest.approx(near)


def test_a_file_adds_gpus_and_overrides_numbers(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[gpu.mine]\nwords = "X"\nmemory_gib = 24\nmemory = 1000\nnode = "box"\n'
        "peaks = { bfloat16 = 100 }\n"
        '[node.box]\ngpus = 2\nlink = 10\nnics = 1\nnetwork = "1g"\nsource = "assumed"\n'
        "[network]\n1g = 0.125\n[gpu.h100-80g]\nmemory_gib = 70\n[reserve]\ngib = 2\n"
    )
    mine = load_hardware("mine", [file])
    assert (mine.usable_bytes, mine.network_rate, mine.peak("bfloat16")) == (
        22 << 30,
        0.0625e9,
        1e14,
    )
    assert load_hardware("h100-80g", [file]).usable_bytes == 68 << 30
    with refused("--gpu mine", "float8", "bfloat16"):
        mine.peak("float8_e4m3fn")
    assert any("node box" in line for line in mine.assumptions)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('gpu.mine = { words = "X", memroy = 1 }', "gpu.mine: memory_gib|memroy = 1: Unexpected"),
        ('gpu.h200 = { memory_gib = "80" }', "gpu.h200: memory_gib = '80'"),
        ("gpu.h200.peaks.bfloat16 = 0", "gpu.h200: peaks.bfloat16 = 0|greater than 0"),
        ('gpu.h200.node = "hgx"', "gpu.h200.node hgx|hgx-a100 or hgx-h100 "),
        ("gpu.h200 = 80", "mine.toml: gpu.h200|a table"),
        ("gpu = 80", "mine.toml: gpu|a table"),
        ("efficiency.h200.link = 0.5", "mine.toml: unknown table efficiency"),
        ("gpus.h200.memory_gib = 80", "mine.toml: unknown table gpus; known: reserve, gpu"),
        ("network.400g = 0", "network.400g: 0|greater than 0"),
        ("gpu = ", "mine.toml|TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, parts):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with refused(*parts.split("|")):
        load_hardware("mine" if "mine" in text else "h200", [file])


def test_every_gpu_of_the_table_has_its_node_and_network():
    for gpu in hardware_table()["gpu"]:
        assert load_hardware(gpu).network_rate > 0


if __name__ == "__main__":
    print("\n".join(table()))
