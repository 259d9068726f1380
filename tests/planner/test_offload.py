"""What is offloaded is planned in the host's memory and over its link; what overlaps is not waited
for; the first rank is the fullest.
"""

from collections import Counter
from dataclasses import replace

import pytest

from tests.jobs import TINY, job
from tests.lanes import sample
from tests.planner.steps import H100
from titanlite.optim.streamed import buffer_bytes
from titanlite.planner.hardware import GIB
from titanlite.planner.plan import make_plan
from titanlite.planner.rehearse import record_step, static_bytes
from titanlite.planner.tables import report

OFFLOAD = [*TINY, "--training.enable_cpu_offload"]
HOST = "--optimizer.state_on=host"
DISK = ["--optimizer.state_on=disk", "--optimizer.state_folder=/nvme"]


@pytest.mark.long
def test_offloaded_state_is_on_the_host_and_crosses_the_link_as_often_as_it_is_used():
    given = job(OFFLOAD, 2)
    kept, recording = static_bytes(given), record_step(given)
    state = kept["parameters"] + kept["gradients"] + kept["optimizer"]
    assert recording.at_peak["host"] >= state
    assert not recording.at_peak["parameters"] and not recording.at_peak["optimizer"]
    plain = record_step(job(TINY, 2))
    assert recording.peak <= plain.peak - kept["parameters"]
    sent = Counter[str]()
    for one, number in recording.collectives().items():
        sent[one.kind] += number * one.bytes * (one.dimension == "host")
    assert sent["from GPU"] == kept["gradients"]
    assert kept["parameters"] < sent["to GPU"] <= 2 * kept["parameters"], "each pass"
    assert any(one.phase.startswith("optimizer on") for one in recording.operations)


@pytest.mark.long
def test_state_on_a_disk_is_read_and_written_there_and_not_in_memory():
    given, on_disk = job(OFFLOAD, 2), job([*OFFLOAD, *DISK], 2)
    size = static_bytes(given)["optimizer"]
    plain, plan = (make_plan(one, H100) for one in (given, on_disk))
    buffers = buffer_bytes(on_disk.config)
    assert plain.on_host - size - 8192 <= plan.on_host - buffers <= plain.on_host - size
    (term,) = [term for term in plan.speed.terms if term.resource == "disk"]
    assert term.amount == 2 * size and term.seconds == pytest.approx(2 * size * 8 / 5e9)


@pytest.mark.long
def test_state_on_the_host_is_planned_there_and_crosses_the_link_both_ways():
    plain = job(TINY, 2)
    on_host = job([*TINY, HOST], 2)
    size = static_bytes(plain)["optimizer"]
    kept, streamed = record_step(plain), record_step(on_host)
    assert streamed.static["host"] == size and not streamed.static["optimizer"]
    before = {one.phase: one.live for one in kept.operations}
    for one in streamed.operations:
        assert one.by_kind[-1] == size
        if one.phase == "forward 1":
            assert one.live <= before[one.phase]
    sent = {one.kind: one.bytes for one in streamed.collectives() if one.dimension == "host"}
    assert sent == {"to GPU": size, "from GPU": size}
    wide = [*TINY, "--model.overrides.vocab_size=2000000"]
    plan, less = (make_plan(job(each, 2), H100) for each in (wide, [*wide, HOST]))
    moved = less.on_host
    counts = plan.totals.static["optimizer"] - moved  # of the steps, 4 bytes a parameter
    assert 0 <= counts < 200 and less.totals.peak < plan.totals.peak - 0.9 * moved


def test_float32_state_is_planned_with_8_bytes_a_parameter_beside_bfloat16_weights():
    narrow = [*TINY, "--training.dtype=bfloat16"]
    plain, wide = (
        static_bytes(job([*narrow, f"--optimizer.state_dtype={dtype}"], 2))
        for dtype in ("like_parameters", "float32")
    )
    assert plain["optimizer"] == 2 * plain["parameters"]
    assert wide == plain | {"optimizer": 4 * plain["parameters"]}


def test_a_plan_that_offloads_fits_only_if_a_nodes_host_holds_all_its_ranks():
    plan = make_plan(job(OFFLOAD, 2), H100)
    assert plan.fits and "the host" in report(plan)
    assert {term.resource for term in plan.speed.terms} >= {"host memory", "to GPU", "from GPU"}
    needed = plan.on_host * H100.node.gpus / GIB
    for gib, fits in ((needed, True), (needed * 0.99, False)):
        host = replace(H100.node.host, gib=gib)
        small = replace(H100, node=replace(H100.node, host=host))
        assert replace(plan, hardware=small).fits == fits


UNEVEN = [
    ("--parallelism.tensor_parallel_degree=2 --model.overrides.n_kv_heads=2", 6),
    ("--optimizer.name=Muon", 3),
    ("--activation_checkpoint.mode=full --training.loss_chunks=4", 3),
]


@pytest.mark.parametrize(("flags", "world"), sample(UNEVEN, nightly=UNEVEN[:1]))
def test_of_ranks_with_uneven_shards_the_first_is_the_fullest(flags, world):
    given = job([*TINY, "--model.overrides.vocab_size=257", *flags.split()], world)
    peaks = [record_step(given, rank).peak for rank in range(0, world, 2)]
    assert peaks[0] == max(peaks)
