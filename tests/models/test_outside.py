"""A model in a user's own package trains without an edit in the checkout."""

import json
from pathlib import Path

from tests.jobs import FLOAT64, QUIET, require_close, run_to_end
from tests.messages import refused, says
from titanlite.cli import main
from titanlite.config.config_json import model_of
from titanlite.registry import expert_paths, get_model

MIXED = [*QUIET, "--model.package=mixed", "--model.name=mixed", "--model.flavor=small"]


def test_a_package_brings_a_model_with_experts_of_its_own(pool, tmp_path):
    """Its table alone tells which weights are experts'; a data-parallel run has the numbers of one
    process.
    """
    spec = get_model("mixed", "mixed")
    assert expert_paths(spec.rules(spec.flavors["small"]), spec.blocks) == ("mixture.experts",)
    argv = [*MIXED, *FLOAT64, "--training.global_batch_size=4"]
    one, two = (pool.run(run_to_end, argv, str(tmp_path / str(n)), world=n)[0] for n in (1, 2))
    says("".join(one["start"]), "mixed small, ", " active: ", "experts 1,024")
    assert one["step"] == two["step"] == 3
    assert one["weights"].keys() >= {"layers.0.dense.up.weight", "layers.1.mixture.experts.up"}
    require_close(two["weights"], one["weights"], 1e-12)


def install_entry_point(folder: Path, name: str, module: str) -> None:
    """Write the dist-info folder that names the module, as pip does."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[titanlite.models]\n{name} = {module}\n")


def test_an_entry_point_registers_a_model_and_one_that_fails_is_one_line_that_names_it(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "broken_owl.py").write_text("import nothing_of_this_name\n")
    install_entry_point(tmp_path, "owl", "broken_owl")
    install_entry_point(tmp_path, "mixed", "mixed")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["models"]) == 0
    printed = capsys.readouterr()
    says(printed.out, "llama3", "mixed")
    (line,) = printed.err.splitlines()
    says(line, '"broken_owl"', "titanlite.models", "ModuleNotFoundError")
    assert main(["models", "owl"]) == 2
    says(capsys.readouterr().err, '"broken_owl"', "ModuleNotFoundError")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "owl"}))
    with refused("owl", "legal: gpt2, llama"):
        model_of(tmp_path)
