"""The table of `titanlite verify --device`, which runs where the numbers matter; here on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.lanes import needs_gpus, sample
from tests.messages import says
from tests.parity.known_faults import measure_with
from titanlite.cli import main
from titanlite.verify.command import rows_of_device
from titanlite.verify.measurements import INITIAL
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import OF_DEVICE

EXPERTS = ["--model.name=qwen3", "--model.flavor=debugmodel_moe"]
BY_NAME = {f"{row.layout} {row.precision}": row for row in OF_DEVICE if row.mesh.world <= 4}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(2))])
@pytest.mark.parametrize("name", sample(BY_NAME, long=["tp2 bfloat16"], nightly=["ep2 bfloat16"]))
def test_a_row_equals_one_process_in_float64(pool, name, device):
    row = BY_NAME[name]
    argv = EXPERTS if row.mesh.ep > 1 else []
    with row_runner(replace(read_model(argv, {}), device=device), pool) as run:
        result = run(row)
        assert result.passed, f"{row}: {result.what} {result.error:.1e}"
        ((file, _),) = run._references.values()
        initial = torch.load(file)[INITIAL].values()
    assert {tensor.dtype for tensor in initial} == {torch.float64}


@pytest.mark.long
def test_a_fault_is_seen_in_low_precision(pool):
    measure = partial(measure_with, "norms-not-reduced")
    with row_runner(replace(read_model([], {}), device="cpu"), pool) as run:
        assert not run(BY_NAME["tp2 bfloat16"], measure=measure).passed


@pytest.mark.long
def test_a_dozen_rows_run_on_two_devices_and_those_of_one_rank_on_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for devices, counts in ((1, (4, 4)), (2, (12, 14)), (8, (14, 16))):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        for argv, count in zip(([], EXPERTS), counts, strict=True):
            model = replace(read_model(argv, {}), device="cuda")
            rows = rows_of_device(model).values()
            assert len(rows) == count, (devices, [str(row) for row in rows])
            assert {row.precision for row in rows} == {"float32", "bfloat16"}
    model = read_model([], {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert len(rows_of_device(replace(model, device="cuda"), most=4)) == 13, "ranks share a GPU"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--device tpu", ["'tpu'", "cpu, cuda"]),
        ("--device cuda", ["--device cuda:", "GPU"]),
        ("--device cpu --full", ["--full and --device", "remove --device"]),
        ("--ranks 4", ["--ranks", "--device cuda"]),
        ("--device cpu --only dp3", ["--only", "llama3 debugmodel", "dp3"]),
    ],
)
def test_what_a_device_cannot_run_is_refused(monkeypatch, capsys, words, parts):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["verify", *words.split()]) == 2
    says(capsys.readouterr().err, *parts)
