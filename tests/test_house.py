"""The shape of the code: imports point down, short files, private torch names in one place, small
rings.

It reads the sources only, and imports neither torch nor titanlite.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (  # from the top; an import points to a lower floor, or stays in its room
    "__main__ __init__",
    "cli",
    "tools",
    "verify",
    "launch",
    "planner",
    "train",
    "checkpoint optim",
    "parallel data fault observe",
    "runtime",
    "config models",
    "registry",
    "errors version",
)
FLOOR = {room: -number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
LOOSE_FILES = {"__init__", "__main__", "cli", "errors", "version"}
MAY_USE_PRIVATE_NAMES = {
    "titanlite/runtime/torch_private.py",  # what a run needs
    "titanlite/planner/torch_private.py",  # what planner and verify need: not loaded by a run
}
MAX_LINES_OF_A_FILE = 600
MAX_LINES_OF_A_FUNCTION = 50
MAX_PARAMETERS = 7
EXCEPTIONS = {
    "titanlite/fault/board.py __init__": "node 0's decision and the pace, besides what all give",
}
"""Files and functions above these limits, with the reason."""
MAX_TOKENS = {
    "ring 1": 30_000,  # a step of training, which one reads in an evening
    "rings 1 and 2": 60_000,  # with every technique and checkpoints: all that changes numbers
    "titanlite": 228_000,  # what one person can keep
}
"""As scripts/count.py counts them."""


count = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "count.py")))
FILES = [str(path) for path in count.source_files()]


@cache
def syntax_tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)


def room_of(module: str) -> str:
    """Return the room of a dotted module name below titanlite: titanlite.train.loss is in train."""
    return module.split(".")[1] if "." in module else "__init__"


def module_of(file: str) -> str:
    """Return the dotted name of a file; models/ is titanlite.models."""
    parts = list(Path(file).with_suffix("").parts)
    parts = parts if parts[0] == "titanlite" else ["titanlite", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of all that is imported, also inside of functions or by a
    string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted_name(node.func).endswith("import_module"):
            yield from (
                (node.lineno, str(a.value)) for a in node.args[:1] if isinstance(a, ast.Constant)
            )


def dotted_name(node: ast.AST) -> str:
    """Return "a.b.c" of such an expression, or an empty string of any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_torch_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and dotted name of every private name of torch or torchao: imported, used or
    in a string.
    """
    private = re.compile(r"torch(ao|data)?(\.\w+)*\._(?!_)\w+(\.\w+)*")
    meaning = {}  # of the file's own names, e.g. dist: torch.distributed
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meaning |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            meaning |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    names = [*imported_modules(tree)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append((node.lineno, node.value))
        elif isinstance(node, ast.Attribute | ast.Call):
            name = dotted_name(node)
            if isinstance(node, ast.Call) and dotted_name(node.func) in (
                "getattr",
                "hasattr",
                "setattr",
            ):
                attribute = node.args[1]
                name = (
                    f"{dotted_name(node.args[0])}."
                    f"{attribute.value if isinstance(attribute, ast.Constant) else ''}"
                )
            first, dot, rest = name.partition(".")
            names.append((node.lineno, meaning.get(first, first) + dot + rest))
    yield from ((line, name) for line, name in names if private.fullmatch(name))


def upward_imports(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every import of a room that is not below the file's own."""
    room = room_of(module_of(file))
    for line, name in imported_modules(tree):
        if name.split(".")[0] == "titanlite":
            imported = (
                room_of(name) if room_of(name) in FLOOR else "__init__"
            )  # e.g. titanlite.__version__
            if imported != room and FLOOR[imported] >= FLOOR[room]:
                yield line, name


def test_imports_point_down():
    wrong = [
        f"{file}:{line} imports {name}"
        for file in FILES
        for line, name in upward_imports(file, syntax_tree(file))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_model_imports_no_other_model_than_common():
    found = []
    for file in FILES:
        parts = Path(file).parts
        if parts[0] != "models" or len(parts) == 2:
            continue
        others = re.compile(rf"titanlite\.models\.(?!(common|{parts[1]})\b)")
        for line, name in imported_modules(syntax_tree(file)):
            if others.match(name):
                found.append(f"{file}:{line} imports {name}")
    assert found == []


@pytest.mark.parametrize(
    ("source", "upward"),
    [
        ("def f():\n    from titanlite.train import worker", True),
        ("from titanlite import cli", True),
        ("from titanlite.data.loader import Loader", True),  # the same floor, another room
        ("import_module('titanlite.checkpoint.saver')", True),
        ("from titanlite.runtime import cluster", False),
        ("from titanlite.parallel.mesh import Mesh", False),
    ],
)
def test_the_check_finds_upward_imports_wherever_they_stand(source, upward):
    assert bool([*upward_imports("titanlite/parallel/fsdp.py", ast.parse(source))]) == upward


def test_private_names_of_torch_stay_in_one_file_and_the_planners_in_another():
    checked = sorted({*FILES} - MAY_USE_PRIVATE_NAMES)
    names = (
        (file, line, name)
        for file in checked
        for line, name in private_torch_names(syntax_tree(file))
    )
    wrong = sorted({f"{file}:{line} uses {name}" for file, line, name in names})
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch.distributed._tensor import DTensor",
        "from torch.distributed.tensor import _utils",
        "def f():\n    import torch\n    torch._foreach_div_([], 2)",
        "import torch\ntorch.ops._c10d_functional.all_reduce",
        "import torch.distributed as dist\ndist._world",
        "from torch.distributed import distributed_c10d as c10d\nc10d._world.pg_map",
        "from torch.nn import Module\nModule._apply",
        "import torch\ngetattr(torch, '_scaled_mm')",
        "import_module('torch.testing._internal')",
        "name = 'torch.distributed.tensor._redistribute'",
        "from torchao.float8._x import y",
    ],
)
def test_the_check_finds_private_names_however_they_are_written(source):
    assert [*private_torch_names(ast.parse(source))]


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.__version__", "self._torch.x", "'torch is not _here'"]
)
def test_the_check_accepts_public_names(source):
    assert not [*private_torch_names(ast.parse(source))]


def ways_to_run_a_file(tree: ast.Module) -> Iterator[str]:
    """Yield every call that could run code that a file of others holds."""
    for line, module in imported_modules(tree):
        if module.split(".")[0] in ("pickle", "dill", "cloudpickle", "marshal", "shelve"):
            yield f"{line}: {module}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted_name(node.func)
        options = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if name in ("eval", "exec", "yaml.load"):
            yield f"{node.lineno}: {name}"
        if name == "torch.load" and options.get("weights_only") != "True":
            yield f"{node.lineno}: {name}"
        if options.get("allow_pickle") == "True" or options.get("trust_remote_code") == "True":
            yield f"{node.lineno}: {name}"


def test_no_file_of_others_is_unpickled_or_run():
    """SECURITY.md says so. The pool pickles between its own processes, and of torch's .metadata a
    few classes are made.
    """
    may_unpickle = ("titanlite/verify/pool.py", "titanlite/checkpoint/torchtitan/metadata.py")
    found = []
    for file in FILES:
        if file not in may_unpickle:
            found += [f"{file}:{way}" for way in ways_to_run_a_file(syntax_tree(file))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "load_dataset(name, trust_remote_code=True)",
        "exec(text)",
    ],
)
def test_the_check_finds_what_would_run_a_file(source):
    assert [*ways_to_run_a_file(ast.parse(source))]


def test_only_a_few_files_stand_outside_of_a_room():
    assert {
        Path(file).stem for file in FILES if Path(file).parent == Path("titanlite")
    } <= LOOSE_FILES
    assert {room_of(module_of(file)) for file in FILES} <= FLOOR.keys(), "a room without a floor"


def test_no_file_is_long():
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in FILES}
    long = {
        file: number
        for file, number in lines.items()
        if number > MAX_LINES_OF_A_FILE and file not in EXCEPTIONS
    }
    assert not long, f"above {MAX_LINES_OF_A_FILE} lines: {long}"


def large_functions(file: str, tree: ast.Module) -> Iterator[str]:
    """Yield the functions with too many lines or parameters; `self` is no parameter."""
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or f"{file} {node.name}" in EXCEPTIONS
        ):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        parameters = [
            a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        if lines > MAX_LINES_OF_A_FUNCTION or len({*parameters} - {"self", "cls"}) > MAX_PARAMETERS:
            yield f"{file}:{node.lineno} {node.name}: {lines} lines, {len(parameters)} parameters"


def test_no_function_is_long_or_has_many_parameters():
    wrong = [line for file in FILES for line in large_functions(file, syntax_tree(file))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n" + "    x = 1\n" * 50,
        "class C:\n    async def f(self, a, b, c, d, *, e, f, g, h): ...",
    ],
)
def test_the_check_finds_large_functions(source):
    assert [*large_functions("titanlite/some.py", ast.parse(source))]


def test_every_package_says_what_it_holds_and_imports_and_never_does():
    for file in FILES:
        is_package = file.startswith("titanlite/") and file.count("/") > 1
        if file == "models/__init__.py" or (is_package and file.endswith("/__init__.py")):
            docstring = ast.get_docstring(syntax_tree(file)) or ""
            assert "import" in docstring and "ever " in docstring, f"{file}: {docstring!r}"
            assert len(docstring.splitlines()) <= 5, file


def test_every_file_is_in_one_ring():
    listed = [path for paths in count.rings().values() for path in paths]
    assert sorted(listed) == count.source_files()


def test_ring_1_imports_nothing_that_stands_around_a_run():
    found = []
    for path in count.rings()[1]:
        for line, name in imported_modules(syntax_tree(str(path))):
            if re.match(r"titanlite\.(launch|planner|verify|tools)\b", name):
                found.append(f"{path}:{line} imports {name}")
    assert found == []


def test_rings_are_small():
    in_ring = {ring: sum(map(count.tokens, paths)) for ring, paths in count.rings().items()}
    whole = sum(count.tokens(Path(file)) for file in FILES if file.startswith("titanlite/"))
    sizes = {
        "ring 1": in_ring[1],
        "rings 1 and 2": in_ring[1] + in_ring[2],
        "titanlite": whole,
    }
    large = {name: size for name, size in sizes.items() if size > MAX_TOKENS[name]}
    assert not large, f"{large}, above {MAX_TOKENS}; scripts/count.py shows where"


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ('"""A docstring."""\n# a comment\nx = 1\n', 3),
        ("x = f'{a + b} and {f\"{c!r}\"}'\n", 3),
        ("def f():\n    'says'\n    return 1\n", 7),
    ],
)
def test_docstrings_do_not_count_and_an_f_string_is_one_token(source, tokens):
    """Python 3.12's lexer divides f-strings, and would count otherwise."""
    assert count.tokens_of(source) == tokens
