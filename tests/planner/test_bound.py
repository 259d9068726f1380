"""The bound lies above every published speed; the estimate, calibrated on 8 GPUs, meets those of
128.

The recordings are formulas, because pipeline parallel, asynchronous tensor parallel and float8
cannot be rehearsed. `python -m tests.planner.test_bound` prints the table of docs/planning.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.jobs import QUIET, job
from tests.test_house import ROOT
from titanlite.config.hardware_table import hardware_table
from titanlite.errors import UserError
from titanlite.layout import Layout
from titanlite.models.llama3 import FLAVORS
from titanlite.planner.hardware import Efficiency, Hardware, load_hardware
from titanlite.planner.record import Collective, Operation, Recording
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
    chunks: int = 1
    """Parts of a stage that 1F1B interleaves."""
    note: str = ""


H100 = "torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
H200 = "torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
L8, L128 = Layout(dp_shard=8), Layout(dp_shard=128)
L70, L405 = Layout(dp_shard=32, tp=8), Layout(pp=8, dp_shard=8, tp=8)
ASYNC = "asynchronous tensor parallel, estimated as without it"
PIPELINE = "pipeline by formula: bubble, no point-to-point, " + ASYNC
ROWS = (
    Row("8B, 8 GPUs, eager", 5762, "8B", L8, 2, EAGER),
    Row("8B, 8 GPUs, compile", 6667, "8B", L8, 2, COMPILED),
    Row("8B, 8 GPUs, compile, float8", 8532, "8B", L8, 2, FLOAT8),
    Row("8B, 128 GPUs, eager", 5605, "8B", L128, 2, EAGER),
    Row("8B, 128 GPUs, compile", 6514, "8B", L128, 2, COMPILED),
    Row("8B, 128 GPUs, compile, float8", 8380, "8B", L128, 2, FLOAT8),
    Row("70B, 256 GPUs, float8", 829, "70B", L70, 16, FLOAT8, "full"),
    Row("70B, 256 GPUs, float8, async TP", 876, "70B", L70, 16, FLOAT8, "full", note=ASYNC),
    Row("405B, 512 GPUs, float8, 1F1B", 100, "405B", L405, 32, FLOAT8, "full", note=PIPELINE),
    Row(
        "405B, 512 GPUs, float8, interleaved",
        128,
        "405B",
        L405,
        32,
        FLOAT8,
        "full",
        chunks=2,
        note=PIPELINE,
    ),
    Row("8B, 32 H200, compile, float8", 10938, "8B", Layout(dp_shard=32), 2, FLOAT8, gpu="h200"),
    Row("8B, 64 H200, compile, float8", 10753, "8B", Layout(dp_shard=64), 2, FLOAT8, gpu="h200"),
)


CALIBRATION = ROWS[:3]


def recording_of(row: Row) -> Recording:
    return Recording([*_operations(row)], {})


def _operations(row: Row) -> Iterator[Operation]:
    """Yield the step of a rank in the middle of the pipeline, or of any rank without one."""
    c, layout = FLAVORS[row.flavor], row.layout
    tokens, gathered = row.batch * SEQUENCE, 1 if row.precision == FLOAT8 else 2
    linear = "float8_e4m3fn" if row.precision == FLOAT8 else "bfloat16"
    attention = 2 * c.dim * (c.dim + c.n_kv_heads * c.head_dim)
    weights = (attention + 3 * c.dim * c.hidden_dim) // layout.tp
    embedding = c.vocab_size * c.dim // layout.tp
    products, scores = 2 * weights * tokens, 4 * tokens * SEQUENCE * c.dim // layout.tp
    every_second = (
        2 * tokens * c.dim * (c.n_kv_heads * c.head_dim + c.dim + c.hidden_dim) // layout.tp
    )  # wk, wo, w3
    layers, is_whole = c.n_layers // layout.pp, layout.pp == 1
    sequence_parallel = [
        Operation(
            "", 0, collective=Collective(kind, "tp", layout.tp, "bfloat16", 2 * tokens * c.dim)
        )
        for kind in ("all-gather", "reduce-scatter", "all-gather", "reduce-scatter")
        if layout.tp > 1
    ]

    def gather(phase: str, size: int) -> Operation:
        return Operation(
            phase, 0, collective=Collective("all-gather", "dp_shard", layout.dp_shard, "", size)
        )

    def reduce(phase: str, size: int) -> Operation:
        return Operation(
            phase,
            0,
            collective=Collective("reduce-scatter", "dp_shard", layout.dp_shard, "", 4 * size),
        )

    def compute(phase: str, flops: float, dtype: str) -> Operation:
        return Operation(phase, 0, int(flops), dtype)

    if is_whole:
        yield gather("embedding", 2 * 2 * embedding)
        yield Operation("embedding", 0, awaits=True)
    for layer in range(layers):
        phase = f"forward {layer}"
        yield gather(phase, gathered * weights)
        yield Operation(phase, 0, awaits=True)
        yield from sequence_parallel
        yield compute(phase, products, linear)
        yield compute(phase, scores, "bfloat16")
    if is_whole:
        yield compute("head", 2 * embedding * tokens, "bfloat16")
        yield compute("backward head", 4 * embedding * tokens, "bfloat16")
        yield gather("backward head", gathered * weights)
    for layer in reversed(range(layers)):
        phase = f"backward {layer}"
        yield Operation(phase, 0, awaits=is_whole)
        if layer and is_whole:  # with a pipeline, parameters stay gathered
            yield gather(phase, gathered * weights)
        yield from sequence_parallel * (2 if row.recompute == "full" else 1)
        again = products if row.recompute == "full" else every_second
        yield compute(phase, 2 * products + again, linear)
        yield compute(phase, scores * 2.5 + scores * (row.recompute == "full"), "bfloat16")
        yield reduce(phase, weights)
    if is_whole:
        yield reduce("backward embedding", 2 * embedding)
    local = (weights * layers + 2 * embedding * is_whole) // layout.dp_shard
    yield Operation(
        "optimizer", 0, moved=4 * 7 * local
    )  # reads four float32 numbers a parameter, writes three


def speed(row: Row, hardware: Hardware | None = None) -> Speed:
    tokens = row.batch * row.layout.batch * SEQUENCE
    hardware = hardware or load_hardware(row.gpu)
    found = speed_of([recording_of(row)], row.layout, hardware, tokens, row.precision != EAGER)[0]
    bubble = 1 + (row.layout.pp - 1) / (row.batch * row.chunks)
    return replace(found, estimate=found.estimate * bubble)


def calibrated(rows: tuple[Row, ...], hardware: Hardware) -> Hardware:
    """Return the hardware with the efficiencies at which the estimates of the rows are what was
    published.
    """
    for row in rows:
        low, high = 0.01, 1.0
        while high - low > 1e-6:
            share = (low + high) / 2
            efficiencies = {**hardware.efficiencies, row.precision: Efficiency(share, "")}
            hardware = replace(hardware, efficiencies=efficiencies)
            found = speed(row, hardware)
            low, high = (
                (share, high)
                if found.tokens_per_gpu(found.estimate) < row.published
                else (low, share)
            )
    return hardware


def table() -> list[str]:
    """Return the table of docs/planning.md."""
    lines = [
        "| tokens/s and GPU | published | bound | share | estimate | error | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = speed(row)
        bound, estimate = (
            found.tokens_per_gpu(seconds) for seconds in (found.bound, found.estimate)
        )
        numbers = (
            f"{row.published:,} | {bound:,.0f} | {row.published / bound:.2f} | {estimate:,.0f}"
        )
        note = "calibrated on it" if row in CALIBRATION else row.note
        lines.append(
            f"| {row.name} | {numbers} | "
            f"{round(estimate / row.published - 1, 3) + 0.0:+.1%} | {note} |"
        )
    return lines


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_bound_is_above_a_published_speed(row):
    found = speed(row)
    assert found.tokens_per_gpu(found.bound) > row.published and found.bound < found.estimate


def test_efficiencies_are_those_at_which_8_gpus_are_as_fast_as_published():
    hardware = load_hardware("h100-96g")
    exact = calibrated(CALIBRATION, hardware)
    for key in (EAGER, COMPILED, FLOAT8):
        assert abs(exact.efficiencies[key].share - hardware.efficiencies[key].share) < 0.001, key


@pytest.mark.parametrize("row", ROWS[3:6], ids=[row.name for row in ROWS[3:6]])
def test_the_estimate_of_128_gpus_is_within_10_percent(row):
    found = speed(row)
    assert abs(found.tokens_per_gpu(found.estimate) / row.published - 1) < 0.10


def test_the_page_shows_every_row_with_its_error():
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page, "\n".join(table())


@pytest.mark.parametrize(
    ("recompute", "tp"), [("full", 2), pytest.param("op", 1, marks=pytest.mark.long)]
)
def test_the_formulas_count_what_a_rehearsal_counts(monkeypatch, recompute, tp):
    monkeypatch.setitem(FLAVORS, "debugmodel", replace(FLAVORS["debugmodel"], n_layers=2))
    mode = "full" if recompute == "full" else "selective"
    argv = [*QUIET, f"--training.seq_len={SEQUENCE}", f"--activation_checkpoint.mode={mode}"]
    rehearsed_job = job([*argv, f"--parallelism.tensor_parallel_degree={tp}"], 8)
    rehearsed = record_step(rehearsed_job)
    formula = recording_of(Row("", 1, "debugmodel", rehearsed_job.layout, 2, EAGER, recompute))
    assert flops_by_phase(rehearsed) == flops_by_phase(formula)
    # titanlite gathers the embedding and the head apart, the embedding once more in backward;
    # TorchTitan keeps both
    beside_blocks = {("all-gather", "dp_shard"): 2, ("reduce-scatter", "dp_shard"): 1}
    beside_blocks |= {("all-gather", "tp"): 2 * (tp - 1), ("reduce-scatter", "tp"): 2 * (tp - 1)}
    for key, more in beside_blocks.items():
        assert number_of(rehearsed, *key) == number_of(formula, *key) + more, key
    awaited = sum(operation.awaits for operation in rehearsed.operations)
    assert awaited == number_of(rehearsed, "all-gather", "dp_shard")


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
        (
            Layout(dp_shard=16),
            collective("all-gather", "dp_shard", 16),
            8,
            1400,
            100,
        ),  # 1/2 of it over 8 NICs
        (Layout(dp_shard=4), collective("reduce-scatter", "dp_shard", 4), 4, 1200, 0),
        (
            Layout(dp_shard=2, tp=8),
            collective("all-gather", "dp_shard", 2),
            1,
            0,
            800,
        ),  # 1/2 of it over one NIC
        (Layout(dp_shard=2, tp=8), collective("all-gather", "tp", 8), 8, 1400, 0),
        (Layout(dp_shard=8, tp=4), collective("all-gather", "dp_shard", 8), 2, 800, 600),
        (
            Layout(dp_replicate=2, dp_shard=8),
            collective("all-reduce", "dp_replicate", 2),
            1,
            0,
            1600,
        ),
        (
            Layout(dp_replicate=2, dp_shard=8),
            collective("all-reduce", "dp_replicate x dp_shard", 16),
            8,
            2800,
            200,
        ),
        (Layout(dp_shard=2, tp=8), collective("broadcast", "world", 16), 8, 1400, 100),
        (
            Layout(dp_shard=16),
            collective("all-gather", "dp_shard", 4),
            4,
            1200,
            0,
        ),  # resharded to 4 ranks
        (Layout(dp_shard=16), collective("all-to-all", "dp_shard", 16), 8, 700, 800),
    ],
)
def test_traffic_follows_from_which_ranks_share_a_node(layout, found, in_node, link, network):
    assert ranks_in_a_node(found, layout, 8) == in_node
    assert traffic(found, layout, 8) == (pytest.approx(link), pytest.approx(network))


def test_the_bound_is_the_largest_of_compute_memory_links_and_network():
    layout, hardware = Layout(dp_shard=16), load_hardware("h100-80g")
    gather, update = collective("all-gather", "dp_shard", 16, 1 << 40), 10**9
    steps = [
        Operation("forward 0", 0, 10**12, "bfloat16", 10**6),
        Operation("optimizer", 0, moved=update),
    ]
    steps += [Operation("forward 0", 0, moved=10**15), Operation("forward 0", 0, collective=gather)]
    found = speed_of([Recording(steps, {})], layout, hardware, 1)[0]
    seconds = {term.resource: term.seconds for term in found.terms}
    near, far = (1 << 40) * 7 / 8 / 450e9, (1 << 40) / 2 / 8 / 50e9
    assert seconds == pytest.approx(
        {
            "compute": 1e12 / 989e12,
            "GPU memory": (10**6 + update) / 3350e9,
            "node link": near,
            "network": far,
        }
    )  # elementwise operations can be fused, so their traffic is not in a bound
    assert found.binding == "node link" and found.bound == pytest.approx(near)
    reduced = Operation(
        "backward 0", 0, collective=collective("all-reduce", "dp_shard", 16, 1 << 40)
    )
    once = speed_of([Recording([reduced], {})], layout, hardware, 1)[0]
    assert once.bound == pytest.approx(near) and once.estimate == pytest.approx(2 * near / 0.8)


def test_compute_waits_for_what_the_schedule_cannot_hide():
    layout, hardware = Layout(dp_shard=8), load_hardware("h100-80g")
    unit = int(
        hardware.peak("bfloat16") * hardware.efficiencies["bfloat16"].share
    )  # FLOPs of a second of compute
    size = int(hardware.link_rate * 0.8 * 8 / 7)  # bytes of a gather or reduction of a second

    def step(gathered: float, computed: float, reduced: float) -> Speed:
        steps: list[Operation] = []
        gather = collective("all-gather", "dp_shard", 8, int(gathered * size))
        reduction = collective("reduce-scatter", "dp_shard", 8, int(reduced * size))
        for phase in ("forward 0", "forward 1", "backward 1", "backward 0"):
            gathers = [
                Operation(phase, 0, collective=gather)
            ]  # in backward one group ahead, as FSDP2 does
            steps += gathers if phase != "backward 0" else []
            steps.append(Operation(phase, 0, awaits=True))
            steps += gathers if phase == "backward 1" else []
            steps.append(Operation(phase, 0, int(computed * unit), "bfloat16"))
            steps += [Operation(phase, 0, collective=reduction)] * phase.startswith("backward")
        steps.append(Operation("optimizer", 0))
        return speed_of([Recording(steps, {})], layout, hardware, 8 * 1000)[0]

    hidden = step(0.5, 1, 0.25)
    assert hidden.estimate == pytest.approx(4 + 0.5 + 0.25)  # the first gather, the last reduction
    assert hidden.exposed == pytest.approx({"dp_shard": 0.75})
    slow = step(2, 1, 0)
    assert slow.estimate == pytest.approx(4 * 2 + 1) and slow.exposed == pytest.approx(
        {"dp_shard": 5}
    )
    assert hidden.tokens_per_gpu(2) == 500 and hidden.days(8000 * 86400, 2) == 2
    starts = [span.start for span in hidden.spans if span.lane == "gathers"]
    assert starts == pytest.approx(
        [0, 0.5, 1.5, 2.5], abs=1e-6
    )  # each when its predecessor was taken


def test_an_unknown_gpu_is_named_with_those_that_exist():
    with pytest.raises(
        UserError,
        match=r"--gpu h100-80: unknown gpu; did you mean h100-80g\? --hardware adds others",
    ):
        load_hardware("h100-80")


def test_a_file_adds_gpus_and_overrides_numbers(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        '[gpu.mine]\nwords = "X"\nmemory_gib = 24\nmemory = 1000\nnode = "box"\n'
        "peaks = { bfloat16 = 100 }\n"
        '[node.box]\ngpus = 2\nlink = 10\nnics = 1\nnetwork = "1g"\nsource = "assumed"\n'
        "[network]\n1g = 0.125\n[gpu.h100-80g]\nmemory_gib = 70\n[reserve]\ngib = 2\n"
    )
    mine = load_hardware("mine", [file])
    assert (
        mine.usable_bytes == 22 << 30
        and mine.network_rate == 0.0625e9
        and mine.peak("bfloat16") == 1e14
    )
    assert load_hardware("h100-80g", [file]).usable_bytes == 68 << 30
    with pytest.raises(
        UserError, match="--gpu mine: its peak in float8 is not known, only in bfloat16"
    ):
        mine.peak("float8_e4m3fn")
    assert any("node box" in line for line in mine.assumptions([]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            'gpu.mine = { words = "X", memroy = 1 }',
            r"gpu\.mine: memory_gib.*: Field required; .*memroy = 1: Unexpected",
        ),
        (
            'gpu.h200 = { memory_gib = "80" }',
            r"gpu\.h200: memory_gib = '80': Input should be a valid number",
        ),
        (
            "gpu.h200.peaks.bfloat16 = 0",
            r"gpu\.h200: peaks\.bfloat16 = 0: Input should be greater than 0",
        ),
        (
            'efficiency.h200.link = { share = 5, source = "x" }',
            r"efficiency\.link: share = 5: Input .* less than or equal",
        ),
        (
            'gpu.h200.node = "hgx"',
            r"gpu\.h200\.node hgx: unknown node; did you mean hgx-a100 or hgx-h100 ",
        ),
        ("gpu.h200 = 80", r"mine\.toml: gpu\.h200 must be a table"),
        ("gpu = 80", r"mine\.toml: gpu must be a table"),
        ("efficiency.h200 = 0.5", r"mine\.toml: efficiency\.h200 must be a table"),
        ("gpus.h200.memory_gib = 80", r"mine\.toml: unknown table gpus; known: reserve, gpu"),
        ("network.400g = 0", r"network\.400g: 0: Input should be greater than 0"),
        (
            "efficiency.h200.bfloat16 = 0.5",
            r"efficiency\.bfloat16: 0.5: Input should be a dictionary",
        ),
        ("gpu = ", "mine.toml: cannot be read as TOML"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, why):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=why):
        load_hardware("mine" if "mine" in text else "h200", [file])


def test_every_gpu_of_the_table_has_its_node_and_network():
    for gpu in hardware_table()["gpu"]:
        assert load_hardware(gpu).network_rate > 0


if __name__ == "__main__":
    print("\n".join(table()))
