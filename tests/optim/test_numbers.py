"""Pure functions: the learning rate, the optimizer's groups, throughput, formats."""

import math

import pytest
import torch

from tests.jobs import MOE, PARROT, TINY, job
from tests.messages import refused
from titanlite.observe.memory import machine_bytes
from titanlite.observe.sinks import StepRecord, format_duration
from titanlite.observe.throughput import peak_tflops
from titanlite.optim import TrainedParam, build_optimizer, check_trained, trained_parameters
from titanlite.optim.build import _is_exempt
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel.build import build_model


@pytest.mark.parametrize(
    ("words", "factors"),
    [
        ("warmup_steps=0", [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("warmup_steps=3 decay_ratio=0.0", [1 / 3, 2 / 3, *[1] * 8]),
        ("warmup_steps=2 decay_ratio=0.3", [0.5, *[1] * 7, 2 / 3, 1 / 3]),
        ("warmup_steps=5 total_steps=20", [0.2, 0.4, 0.6, 0.8, 1, *[1 - n / 15 for n in range(5)]]),
        ("warmup_steps=20", [n / 10 for n in range(1, 11)]),
        ("warmup_steps=0 min_lr_factor=0.2", [1, 0.8, 0.6, 0.4]),
        ("warmup_steps=0 decay_type=sqrt", [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
        (
            "warmup_steps=0 decay_type=cosine",
            [1, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)],
        ),
        ("warmup_steps=0 total_steps=2 min_lr_factor=0.1", [1, 0.55, *[0.1] * 4]),  # beyond its end
    ],
)
def test_the_factors_of_the_learning_rate_are_torchtitans(words, factors):
    argv = [*TINY, f"--training.steps={len(factors)}", "--optimizer.lr=1.0"]
    config = job([*argv, *(f"--lr_scheduler.{word}" for word in words.split())], 1).config
    found = [learning_rate(config, step) for step in range(1, len(factors) + 1)]
    assert found == pytest.approx(factors, rel=1e-12)


def names(*argv: str) -> tuple[set[str], set[str]]:
    """Return the names of all trained parameters, and of those without weight decay."""
    tested = job([*argv], 1)
    model, table = build_model(tested)
    no_decay = tested.config.optimizer.no_decay
    check_trained(model, table, tested)
    trained = trained_parameters([model], table, "layers", no_decay)
    return {item.name for item in trained}, {item.name for item in trained if not item.decays}


def test_norms_and_biases_are_not_decayed():
    trained, exempt = names(*PARROT)
    assert {"layers.0.up.weight", "tok_embeddings.weight"} < trained - exempt
    assert exempt == {name for name in trained if name.endswith("bias") or ".norm." in name}
    of_heads = "layers.0.attention.q_norm.weight"  # replicated, with one dimension, as a bias is
    trained, exempt = names(*MOE)
    assert of_heads in exempt and exempt == {name for name in trained if "norm" in name}
    assert names(*PARROT, "--optimizer.no_decay=[]")[1] == set()
    assert names(*PARROT, "--optimizer.no_decay=['tok_*']")[1] == {"tok_embeddings.weight"}


@pytest.mark.parametrize(
    ("key", "pattern", "named"),
    [
        ("optimizer.no_decay", "nothing.*", '"nothing.*"'),
        ("model.freeze", "nothing.*", '"nothing.*"'),
        ("model.freeze", "*", "nothing to train"),
    ],
)
def test_a_pattern_without_effect_or_one_that_freezes_all_is_refused(key, pattern, named):
    with refused(key, named):
        names(*PARROT, f"--{key}=['{pattern}']")


def test_muon_without_a_matrix_to_train_is_refused_before_ranks_start():
    with refused("optimizer.name", "Muon", "AdamW"):
        names(*TINY, "--optimizer.name=Muon", '--model.freeze=["layers.*"]')


def test_a_gain_is_not_decayed_by_its_role_whatever_its_name():
    gain = torch.nn.Parameter(torch.ones(4))
    for name, role, exempt in (
        ("layers.0.extra", "norm", True),
        ("layers.0.norm.bias", "norm", False),
        ("layers.0.norm.weight", "replicated", True),
        ("layers.0.extra", "replicated", False),
    ):
        assert _is_exempt(name, role, gain, ["norms"]) == exempt, (name, role)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_every_implementation_takes_the_same_steps(name, implementation):
    """Gradients that differ show betas, and gradients no larger than 1e-7 show eps."""
    argv = [*TINY, f"--optimizer.name={name}", f"--optimizer.implementation={implementation}"]
    config = job(argv, 1).config
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(3))]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    trained = [
        TrainedParam("a", parameters[0], "column", True, True),
        TrainedParam("b", parameters[1], "norm", False, False),
    ]
    options = {} if name == "SGD" else {"betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {"params": [twin], "weight_decay": decay}
        for twin, decay in zip(twins, (0.1, 0.0), strict=True)
    ]
    plain = getattr(torch.optim, name)(groups, lr=config.optimizer.lr, **options)
    optimizer = build_optimizer(trained, config)
    for scale in (1.0, 1e-7, 3e-8, 0.1) if name == "SGD" else (1e-7, 3e-8, 2e-7):
        for parameter, twin in zip(parameters, twins, strict=True):
            parameter.grad = torch.randn_like(parameter) * scale
            twin.grad = parameter.grad.clone()
        optimizer.step()
        plain.step()
    for parameter, twin in zip(parameters, twins, strict=True):
        assert torch.allclose(parameter, twin, rtol=1e-6, atol=1e-7)


def test_mfu_of_an_unknown_device_is_not_guessed(monkeypatch):
    assert peak_tflops(torch.device("cpu")) is None
    for name, peak in {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": 835,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA H200": 989,
        "NVIDIA H20": 148,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA GB200": 2500,
        "NVIDIA GB300": 2500,
        "NVIDIA B300 SXM6 AC": 2250,
        "NVIDIA GeForce RTX 4090": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(torch.device("cuda", 0)) == peak, name


def test_the_log_line_is_the_one_that_parsers_know():
    record = StepRecord(
        1, 8.04034, 8.1, 1.347, 1e-3, 10, 27483.2, 1.97, 0.2, 0.5, 0.4, 0.6, 0.0015, 1.02, 0
    )
    assert record.line(11, 1.08) == (
        "step:  1  loss:  8.04034  grad_norm:  1.3470  memory:  1.02GiB(1.08%)  "
        "tps: 27,483  tflops: 1.97  mfu: 0.20%  eta: 0:05  data: 0.3%"
    )
    tags = "loss_metrics/global_avg_loss loss_metrics/global_max_loss grad_norm throughput(tps)"
    assert {*tags.split(), "mfu(%)"} < {*record.tags()}


def test_formats():
    assert [format_duration(s) for s in (3, 62, 3723)] == ["0:03", "1:02", "1:02:03"]
    assert machine_bytes() > 1 << 28
