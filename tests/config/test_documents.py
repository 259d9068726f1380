"""docs/config.md and the JSON schema are current; shipped configs name their schema."""

import pytest

from tests.messages import says
from tests.runs import ROOT
from titanlite.cli import main
from titanlite.config.docs import help_text
from titanlite.config.load import shipped_configs
from titanlite.config.schema import KEYS
from titanlite.config.torchtitan import DIFFERENT, FOREIGN, NEW


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("docs/config.md", "config --markdown"),
        ("titanlite/config/config.schema.json", "config --schema"),
        ("docs/models.md", "models --markdown"),
    ],
)
def test_a_written_document_is_current(capsys, file, words):
    assert main(words.split()) == 0
    assert (ROOT / file).read_text() == capsys.readouterr().out, f"titanlite {words} > {file}"


def test_a_model_is_described_by_its_flavors_parameters_and_fields(capsys):
    assert main(["models", "llama3"]) == 0
    out = capsys.readouterr().out
    says(out, "1,235,814,400", "rope_scaling.factor 32.0", "rope_scaling.original_positions  8192")
    assert ["n_layers", "required"] in map(str.split, out.splitlines())
    assert "gpt2" not in out and main(["models", "lama3"]) == 2
    says(capsys.readouterr().err, "llama3?")


def test_every_key_is_explained():
    assert all(info.description for info in KEYS.values())
    text = help_text()
    assert all(f"--{key} = " in text for key in KEYS)


def test_the_differences_from_torchtitan_name_existing_keys():
    assert set(NEW) <= KEYS.keys() and set(DIFFERENT) <= KEYS.keys()
    assert not FOREIGN.keys() & KEYS.keys()


@pytest.mark.parametrize("name", shipped_configs())
def test_a_shipped_config_names_its_schema(name):
    text = (ROOT / "train_configs" / name).read_text()
    assert text.startswith("#:schema ../titanlite/config/config.schema.json")
