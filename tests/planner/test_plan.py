"""`titanlite plan`: errors, exit codes, what the JSON has, and what a plan makes of a recording."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.jobs import TINY, job
from tests.messages import says
from tests.planner.steps import H100
from tests.runs import ROOT, environment
from titanlite.cli import main
from titanlite.config.hardware_table import recognize
from titanlite.planner.hardware import GIB
from titanlite.planner.plan import Plan
from titanlite.planner.record import KINDS, Collective, Operation, Recording, add_up
from titanlite.planner.speed import speed_of
from titanlite.planner.tables import report

GATHER = Collective("all-gather", "dp_shard", 4, "bfloat16", 3 * GIB)
SUM = Collective("all-reduce", "dp_replicate", 4, "float32", GIB)


def kinds(**sizes: int) -> tuple[int, ...]:
    return tuple(sizes.get(kind, 0) for kind in KINDS)


def plan_of(peak: int, *options: str, tokens: float = 0, world: int = 16) -> Plan:
    """Return the plan of a hand-made recording on four replicas, each sharded if world is 16."""
    planned = job([*TINY, "--parallelism.data_parallel_replicate_degree=4", *options], world)
    compute = Operation("forward 0", peak // 3, flops=10**12, dtype="bfloat16", moved=GIB)
    full = kinds(parameters=GIB, logits=peak - GIB)
    operations = [
        Operation("forward 0", peak // 2, collective=GATHER, by_kind=kinds(gathered=peak // 2)),
        compute,
        replace(compute, phase="head", live=peak, by_kind=full),
        Operation("backward 0", peak // 2, collective=GATHER),
        Operation("backward 0", peak // 2, collective=SUM),
    ]
    recording = Recording(operations, {"parameters": GIB})
    totals = add_up(recording)
    speed = speed_of(totals, planned.layout, H100, planned.batch.total * 16)
    return Plan(planned, H100, totals, speed, flops_per_token=10**9, tokens=tokens)


def test_the_verdict_leaves_the_reserve_free():
    usable = H100.usable_bytes
    assert plan_of(usable).fits and not plan_of(usable + 1).fits
    text = report(plan_of(usable))
    assert "It fits" in text and text.count("assumed") == text.count("  assumed:\n")
    says(text, "  assumed:\n    4 GiB")
    says(report(plan_of(90 * GIB)), "not fit", "missing")


def test_the_second_verdict_is_about_flushes_of_the_allocators_cache():
    most = int(H100.usable_bytes / H100.reserve.allocator)
    fits, does_not = (report(plan_of(peak)).splitlines()[3] for peak in (most, most + GIB))
    assert fits.startswith("No allocator cache flushes") and "flushes possible" in does_not
    says(report(plan_of(50 * GIB)), "66.00 GiB")
    assert "flushes" not in report(plan_of(90 * GIB))


def test_the_allocator_takes_less_beside_the_peak_where_nothing_is_sharded():
    sharded, alone = plan_of(50 * GIB), plan_of(50 * GIB, world=4)
    assert sharded.without_flushes == 50 * GIB * H100.reserve.allocator
    assert alone.without_flushes == 50 * GIB * H100.reserve.allocator_alone


def test_the_tables_name_the_moment_the_links_and_the_days():
    text = report(plan_of(50 * GIB, tokens=1e12))
    says(text, "in head", "50.00", "1e+12 tokens")
    (gather,) = (line for line in text.splitlines() if "all-gather" in line)
    assert [gather.split()[column] for column in (0, 2, 6, 7)] == [
        "dp_shard",
        "bfloat16",
        "2",
        "6.00",
    ]
    (reduction,) = (line for line in text.splitlines() if "all-reduce" in line)
    assert "2 in a node" in reduction  # replicas are 4 ranks apart
    assert text.index("all-reduce") < text.index("all-gather"), "outer dimensions first"
    plan = plan_of(50 * GIB)
    assert "days" not in report(plan)


def test_what_a_plan_of_compiled_blocks_assumes_is_named():
    assert "fused" not in report(plan_of(50 * GIB))
    assert "fused" in report(plan_of(50 * GIB, "--compile.enable"))


def test_the_json_has_everything_that_is_shown():
    found = json.loads(json.dumps(plan_of(50 * GIB, tokens=1e12).to_json()))
    assert [*found] == [
        *("version", "job", "hardware", "memory", "communication", "speed", "ranks")
    ]
    assert found["job"]["layout"] == {"pp": 1, "dp_replicate": 4, "dp_shard": 4, "cp": 1, "tp": 1}
    memory = found["memory"]
    assert (memory["peak"], memory["moment"], memory["fits"]) == (50 * GIB, "head", True)
    assert sum(row["bytes"] for row in found["communication"]) == 7 * GIB
    bound = found["speed"]["bound"]
    assert bound.keys() == {"seconds", "tokens_per_second_per_gpu", "mfu_percent", "days"}
    assert bound["seconds"] > 0 and bound["days"] > 0
    tokens_per_second = found["job"]["tokens_per_step"] / bound["seconds"] / 16
    assert bound["tokens_per_second_per_gpu"] == pytest.approx(tokens_per_second)
    assert bound["mfu_percent"] == pytest.approx(100 * tokens_per_second * 1e9 / 989e12)


@pytest.mark.parametrize(
    ("name", "gib", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80g"),
        ("NVIDIA H100 PCIe", 79, "h100-pcie"),
        ("NVIDIA H100 NVL", None, "h100-nvl"),  # although an H100 with less memory is known
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"),
        ("NVIDIA RTX 4090", 24, ""),
    ],
)
def test_a_gpu_is_recognized_by_its_name_and_memory(name, gib, gpu):
    assert recognize(name, gib and gib * GIB) == gpu


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("", "--gpu|h100-nvl"),
        ("--gpu h100", "--gpu h100:|h100-nvl or h100-pcie or h100-80g or h100-96g? --hardware"),
        ("--gpu rtx", "--gpu rtx:|known: h100-nvl, h100-pcie, "),
        ("--gpu h100-80g --tokens many", "--tokens:|> 0"),
        ("--gpu h100-80g --imbalance 0.5", "--imbalance:|>= 1"),
        ("--gpu h100-80g --imbalance x", "--imbalance:|>= 1"),
        ("--gpu h100-80g --imbalance 2", "--imbalance 2:|experts"),
        ("--gpu h100-80g --out best.toml", "--out|--search"),
        ("--gpu h100-80g --search --json", "one plan"),
        ("--gpu h100-80g --hardware /nowhere.toml", "/nowhere.toml:|No such file"),
        ("--gpu h100-80g --html /nowhere/plan.html", "plan.html:|folder /nowhere"),
        ("--gpu h100-80g --wrld 8", "--world?"),
        ("--gpu h100-80g --parallelism.tensor_parallel_degree=3", "tensor_parallel_degree = 3"),
    ],
)
def test_a_mistake_is_one_message_and_2(argv, parts, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert main(["plan", *argv.split()]) == 2
    out = capsys.readouterr()
    says(out.err, *parts.split("|"))
    assert out.out == "" and "Traceback" not in out.err


@pytest.mark.nightly
def test_405b_on_512_gpus_takes_4_gib_at_most():
    argv = ["plan", "--config", "llama_405b.toml", "--world", "512", "--gpu", "h100-80g"]
    process = subprocess.Popen(
        [sys.executable, "-m", "titanlite", *argv],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    out = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, out
    assert usage.ru_maxrss < 4 << 20  # KiB
    says(out, "405B on 512 h100-80g GPUs: dp_shard 64 x tp 8", "It fits")


@pytest.mark.long
def test_what_a_search_writes_is_a_config_to_lay_over(tmp_path, capsys):
    given, best = [*TINY, "--world", "2"], f"{tmp_path / 'best.toml'}"
    search = f"--gpu h100-80g --search --max-seconds 5 --out {best}".split()
    assert main(["plan", *given, *search, "--training.global_batch_size=8"]) == 0
    (header, first, *_) = capsys.readouterr().out.splitlines()[1:]
    assert "bound s" in header and "batch" in first
    assert main(["config", *given, "--config", "debug.toml", best]) == 0


@pytest.mark.long
def test_the_command_plans_a_job_as_tables_and_as_json(capsys):
    argv = ["plan", *TINY, "--world", "2", "--gpu", "h100-80g"]
    assert main(argv) == 0
    says(capsys.readouterr().out, "debugmodel on 2 h100-80g GPUs: dp_shard 2", "It fits")
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak"] == sum(found["memory"]["at_peak"].values())
