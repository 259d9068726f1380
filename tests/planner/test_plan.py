"""`titanlite plan`: errors, exit codes, what the JSON has, and what a plan makes of a recording."""

import json
import os
import re
import resource
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.jobs import TINY, job
from tests.runs import ROOT, environment
from titanlite.cli import main
from titanlite.config.hardware_table import recognize
from titanlite.planner.goodput import LEAST_INTERVAL
from titanlite.planner.hardware import GIB, load_hardware
from titanlite.planner.plan import Plan
from titanlite.planner.record import KINDS, Collective, Operation, Recording
from titanlite.planner.speed import speed_of
from titanlite.planner.tables import report

GATHER = Collective("all-gather", "dp_shard", 4, "bfloat16", 3 * GIB)
SUM = Collective("all-reduce", "dp_replicate", 4, "float32", GIB)


def goodput(capsys, *options: str) -> tuple[float, dict[str, float]]:
    """Return the goodput of 405B on 16,384 GPUs in percent, and the seconds of each term."""
    argv = ["plan", "--config", "llama_405b_pp.toml", "--world", "16384", "--gpu", "h100-80g"]
    assert main([*argv, *options]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    seconds = {}
    for line in lines:
        name, value, source = re.split("  +", line.replace(" s  ", "  "))
        assert source.startswith(("measured", "given", "assumed", "half of", "the sum")), line
        seconds[name] = float(value.replace(",", ""))
    return float(last.split()[1]), seconds


def test_goodput_has_its_terms_and_where_each_is_from(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    share, terms = goodput(capsys, "--mtbf", "3", "--checkpoint.interval=500")
    assert terms["from save to save"] == pytest.approx(500 * terms["a step"], rel=0.01)
    lost = terms["from save to save"] / 2 + terms["a save is written"]
    assert terms["lost with a failure"] == pytest.approx(lost, abs=0.2)
    often = goodput(capsys, "--mtbf", "3")
    assert often[1]["from save to save"] == LEAST_INTERVAL and share < 50 < 95 < often[0]
    assert goodput(capsys, "--mtbf", "1")[0] < often[0]
    names = [*terms]
    parts = names[names.index("lost with a failure") + 1 : -1]
    assert sum(terms[name] for name in parts) == pytest.approx(terms[names[-1]], abs=0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--mtbf", "3"], "without checkpoint.enable"), (["--mtbf", "0"], "a number > 0")],
)
def test_goodput_without_checkpoints_or_failures_is_refused(capsys, options, says):
    argv = ["plan", "--config", "llama_8b.toml", "--world", "64", "--gpu", "h100-80g"]
    with suppress(SystemExit):
        assert main([*argv, *options]) == 2
    assert says in capsys.readouterr().err


def kinds(**sizes: int) -> tuple[int, ...]:
    return tuple(sizes.get(kind, 0) for kind in KINDS)


def plan_of(peak: int, *options: str, tokens: float = 0) -> Plan:
    """Return the plan of a hand-made recording on 16 ranks, 4 of which share parameters."""
    planned = job([*TINY, "--parallelism.data_parallel_replicate_degree=4", *options], world=16)
    operations = [
        Operation("forward 0", peak // 2, collective=GATHER, by_kind=kinds(gathered=peak // 2)),
        Operation("forward 0", peak // 3, flops=10**12, dtype="bfloat16", moved=GIB),
        Operation(
            "head",
            peak,
            flops=10**12,
            dtype="bfloat16",
            moved=GIB,
            by_kind=kinds(parameters=GIB, logits=peak - GIB),
        ),
        Operation("backward 0", peak // 2, collective=GATHER),
        Operation("backward 0", peak // 2, collective=SUM),
    ]
    recording = Recording(operations, {"parameters": GIB})
    hardware = load_hardware("h100-80g")
    speed = speed_of([recording], planned.layout, hardware, planned.batch.total * 16)[0]
    return Plan(planned, hardware, recording, speed, flops_per_token=10**9, tokens=tokens)


def test_the_verdict_leaves_the_reserve_free():
    usable = load_hardware("h100-80g").usable_bytes
    assert plan_of(usable).fits and not plan_of(usable + 1).fits
    assert "It fits" in report(plan_of(usable)) and "It does not fit" in report(plan_of(usable + 1))
    text = report(plan_of(usable))
    assert (
        "  assumed:\n    4 GiB of the GPU stay free for CUDA, NCCL and fragments (not measured)\n"
        in text
    )
    assert text.count("assumed") == text.count("  assumed:\n"), "once above each list"


def test_the_second_verdict_is_about_flushes_of_the_allocators_cache():
    hardware = load_hardware("h100-80g")
    most = int(hardware.usable_bytes / hardware.reserve.allocator)
    fits, does_not = (report(plan_of(peak)).splitlines()[3] for peak in (most, most + GIB))
    assert fits.startswith("It fits without flushes of torch's cache")
    assert does_not.startswith("It may not fit without flushes of torch's cache")
    assert "needs up to 66.00 GiB" in report(plan_of(50 * GIB))


def test_the_tables_name_the_moment_the_links_and_the_days():
    text = report(plan_of(50 * GIB, tokens=1e12))
    assert "peak, in head" in text and "50.00" in text
    (gather,) = (line for line in text.splitlines() if "all-gather" in line)
    assert gather.split()[:8] == "dp_shard all-gather bfloat16 in the node 2 6.00".split()
    (reduction,) = (line for line in text.splitlines() if "all-reduce" in line)
    assert "2 in a node" in reduction  # replicas are 4 ranks apart
    assert text.index("all-reduce") < text.index("all-gather"), "outer dimensions first"
    assert "days for 1e+12 tokens" in text and "days" not in report(plan_of(50 * GIB))


def test_a_plan_that_does_not_fit_says_so_and_one_of_compiled_blocks_what_it_assumes():
    assert "fused kernels" not in report(plan_of(50 * GIB))
    assert "fused kernels" in report(plan_of(50 * GIB, "--compile.enable"))
    for options in ((), ("--compile.enable",)):
        text = report(plan_of(90 * GIB, *options))
        assert "It does not fit" in text and "missing" in text


def test_the_json_has_everything_that_is_shown():
    found = json.loads(json.dumps(plan_of(50 * GIB, tokens=1e12).to_json()))
    assert found.keys() == set(
        "version job hardware memory communication speed changes ranks".split()
    )
    assert found["job"]["layout"] == {"pp": 1, "dp_replicate": 4, "dp_shard": 4, "cp": 1, "tp": 1}
    memory = found["memory"]
    assert (memory["peak"], memory["moment"], memory["fits"]) == (50 * GIB, "head", True)
    assert [phase["phase"] for phase in memory["phases"]] == ["forward 0", "head", "backward 0"]
    assert (
        memory["phases"][0]["live"] == 25 * GIB
        and memory["phases"][0]["by_kind"]["gathered"] == 25 * GIB
    )
    assert sum(row["bytes"] for row in found["communication"]) == 7 * GIB
    bound, estimate = found["speed"]["bound"], found["speed"]["estimate"]
    assert (
        bound.keys()
        == estimate.keys()
        == {"seconds", "tokens_per_second_per_gpu", "mfu_percent", "days"}
    )
    assert 0 < bound["seconds"] <= estimate["seconds"] and bound["days"] > 0
    tokens_per_second = found["job"]["tokens_per_step"] / bound["seconds"]
    assert bound["tokens_per_second_per_gpu"] == pytest.approx(tokens_per_second / 16)
    assert bound["mfu_percent"] == pytest.approx(100 * tokens_per_second / 16 * 1e9 / 989e12)


def test_a_gpu_is_recognized_by_its_name_and_memory():
    assert recognize("NVIDIA H100 80GB HBM3", 85 * 10**9) == "h100-80g"
    assert recognize("NVIDIA H100 PCIe", 85 * 10**9) == "h100-pcie"
    assert (
        recognize("NVIDIA H100 NVL", None) == "h100-nvl"
    )  # although an H100 with less memory is known
    assert recognize("NVIDIA A100-SXM4-40GB", 42 * 10**9) == "a100-40g"
    assert recognize("NVIDIA A100-SXM4-80GB", 85 * 10**9) == "a100-80g"
    assert recognize("NVIDIA GeForce RTX 4090", 24 << 30) == ""


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "this machine has no NVIDIA GPU; --gpu names one to plan for: h100-nvl"),
        (
            ["--gpu", "h100"],
            "--gpu h100: unknown gpu; "
            "did you mean h100-nvl or h100-pcie or h100-80g or h100-96g? --hardware",
        ),
        (["--gpu", "rtx"], "--gpu rtx: unknown gpu; known: h100-nvl, h100-pcie, "),
        (["--gpu", "h100-80g", "--tokens", "many"], "--tokens: must be a number > 0"),
        (["--gpu", "h100-80g", "--imbalance", "0.5"], "--imbalance: must be a number >= 1"),
        (["--gpu", "h100-80g", "--imbalance", "x"], "--imbalance: must be a number >= 1"),
        (["--gpu", "h100-80g", "--imbalance", "2"], "--imbalance 2: the model has no experts"),
        (["--gpu", "h100-80g", "--out", "best.toml"], "--out belongs to --search"),
        (["--gpu", "h100-80g", "--measure", "2"], "--measure belongs to --search"),
        (["--gpu", "h100-80g", "--search", "--json"], "show one plan"),
        (
            ["--selftest", "--world", "2"],
            "--selftest plans its own small models: remove the other options",
        ),
        (
            ["--gpu", "h100-80g", "--hardware", "/nowhere.toml"],
            "/nowhere.toml: cannot be read: No such file",
        ),
        (
            ["--gpu", "h100-80g", "--html", "/nowhere/plan.html"],
            "plan.html: there is no folder /nowhere",
        ),
        (["--gpu", "h100-80g", "--wrld", "8"], "did you mean --world?"),
        (["--gpu", "h100-80g", "--parallelism.tensor_parallel_degree=3"], "3 does not divide"),
    ],
)
def test_a_mistake_is_one_message_and_2(argv, part, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    assert main(["plan", *argv]) == 2
    out = capsys.readouterr()
    assert part in out.err and out.out == "" and "Traceback" not in out.err


@pytest.mark.long
def test_405b_on_512_gpus_takes_30_cpu_seconds_and_4_gib_at_most():
    argv = ["plan", "--config", "llama_405b.toml", "--world", "512", "--gpu", "h100-80g"]
    limit = (30, 30)  # the kernel kills what takes more
    process = subprocess.Popen(
        [sys.executable, "-m", "titanlite", *argv],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit),
    )
    out = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, out
    assert usage.ru_maxrss < 4 << 20  # KiB
    assert "llama3 405B on 512 h100-80g GPUs: dp_shard 64 x tp 8" in out and "It fits" in out


@pytest.mark.exhaustive
def test_what_a_search_writes_is_a_config_to_lay_over_and_the_best_can_be_measured(
    tmp_path, capsys
):
    given, best = [*TINY, "--world", "2"], tmp_path / "best.toml"
    search = [
        "--gpu",
        "h100-80g",
        "--search",
        "--max-seconds",
        "5",
        "--measure",
        "1",
        "--out",
        str(best),
    ]
    assert main(["plan", *given, *search, "--training.global_batch_size=8"]) == 0
    (header, first, *_) = capsys.readouterr().out.splitlines()[1:]
    assert "measured s" in header and float(first.split()[2]) > 0
    assert main(["config", *given, "--config", "debug.toml", str(best)]) == 0
    assert "data_parallel_shard_degree = " in best.read_text()


def test_the_command_plans_a_job_as_tables_and_as_json(capsys):
    argv = ["plan", *TINY, "--world", "2", "--gpu", "h100-80g"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "llama3 debugmodel on 2 h100-80g GPUs: dp_shard 2" in text and "It fits" in text
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["peak"] == sum(found["memory"]["at_peak"].values())
