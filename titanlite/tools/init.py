"""`titanlite init`: a new project with a config, a model, its table, a test, and a SLURM script."""

import keyword
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path

from titanlite.config.load import SHIPPED
from titanlite.config.options import declare
from titanlite.errors import UserError, command_line
from titanlite.registry import model_names
from titanlite.runtime.store import LocalPath

TEMPLATES = Path(__file__).with_name("project")
FILES = {
    "README.md": "README.md.template",
    "PROJECT/__init__.py": "package.py.template",
    "PROJECT/model.py": "model.py.template",
    "test_PROJECT.py": "test.py.template",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    declare(parser, {"NAME": "name of the new folder, its package and its model"})
    parser.epilog = "example: titanlite init mine"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Write the project, and print how to train it."""
    name = arguments.name
    _check(name)
    staging = LocalPath(f".{name}.new")
    staging.remove()
    for path, content in _files(name).items():
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    LocalPath(name).publish(staging)
    print(f"{name}/ has a model, its config and its test; its README.md explains them\n")
    print(f"  cd {name}")
    print("  " + command_line("titanlite", "train", "--config", f"{name}.toml"))
    return 0


def _check(name: str) -> None:
    """Raise unless a name is available for a folder, a package and a model."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise UserError(f'"{name}" must be a name for a Python package, such as my_model')
    if name in model_names():
        raise UserError(f'"{name}" is a model of titanlite; take another name')
    if Path(name).exists():
        raise UserError(f"{name} exists already, and was not changed")
    if find_spec(name):
        raise UserError(f'"{name}" is a Python package already; take another name')


def _files(name: str) -> dict[str, str]:
    """Return the texts of a project by path."""
    texts = {path: _read(TEMPLATES / template) for path, template in FILES.items()}
    config = _read(SHIPPED / "debug.toml").partition("\n\n")[2]
    config = config.replace('name = "llama3"', 'package = "PROJECT"\nname = "PROJECT"')
    texts["PROJECT.toml"] = config.replace("a small Llama learns", "PROJECT learns")
    script = _read(TEMPLATES / "train.slurm")
    script = script.replace("scripts/slurm/train.slurm --config llama_8b.toml", "train.slurm")
    texts["train.slurm"] = (
        script.replace('./run_train.sh "$@"', 'titanlite train --config PROJECT.toml "$@"')
        .replace("from the checkout", "from the project")
        .replace("the checkout is", "the project is")
    )
    texts[".gitignore"] = "outputs/\n__pycache__/\n"
    found = dict[str, str]()
    for path, text in texts.items():
        found[path.replace("PROJECT", name)] = text.replace("PROJECT", name)
    return found


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
