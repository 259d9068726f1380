"""docs/config.md and the JSON schema are current; shipped configs name their schema."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.cli import main
from titanlite.config.docs import help_text, json_schema, markdown
from titanlite.config.load import shipped_configs
from titanlite.config.schema import KEYS
from titanlite.config.torchtitan import DIFFERENT, FOREIGN, NEW

ROOT = Path(__file__).parents[2]


def test_docs_config_md_is_current():
    assert (ROOT / "docs/config.md").read_text() == markdown(), (
        "run: titanlite config --markdown > docs/config.md"
    )


def test_the_json_schema_is_current():
    assert (ROOT / "titanlite/config/config.schema.json").read_text() == json_schema(), (
        "run: titanlite config --schema > titanlite/config/config.schema.json"
    )


def test_docs_models_md_is_current(capsys):
    main(["models", "--markdown"])
    assert (ROOT / "docs/models.md").read_text() == capsys.readouterr().out, (
        "run: titanlite models --markdown > docs/models.md"
    )


def test_a_model_is_described_by_its_flavors_parameters_and_fields(capsys):
    assert main(["models", "llama3"]) == 0
    out = capsys.readouterr().out
    assert (
        "1,235,814,400" in out
        and "rope_scaling.factor 32.0" in out
        and "rope_scaling.original_positions  8192" in out
    )
    assert ["n_layers", "required"] in map(str.split, out.splitlines())
    assert "gpt2" not in out and main(["models", "lama3"]) == 2
    assert "did you mean llama3?" in capsys.readouterr().err


def test_every_key_is_explained():
    assert all(info.description for info in KEYS.values())
    assert all(f"--{key} = " in help_text() for key in KEYS)


def test_the_differences_from_torchtitan_name_existing_keys():
    assert set(NEW) <= KEYS.keys() and set(DIFFERENT) <= KEYS.keys()
    assert not FOREIGN.keys() & KEYS.keys()


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_names_its_schema(name):
    text = (ROOT / "train_configs" / name).read_text()
    assert text.startswith("#:schema ../titanlite/config/config.schema.json")
    assert json.loads(json_schema())["properties"].keys() >= {"job", "training"}


def test_the_config_and_models_commands_do_not_import_torch():
    code = (
        "import sys, titanlite.cli as c; c.main(['config']); c.main(['models']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, cwd=ROOT, check=False
        ).returncode
        == 0
    )
