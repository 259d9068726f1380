"""The `titanlite` command: finds the module of a command, parses its options, and handles every
error.

A command's module has `add_arguments(parser)` and `run(arguments, overrides) -> exit code`. It is
imported only for its own command, and imports torch only in `run`. A parser with `takes_overrides`
leaves `--config` and `--section.key VALUE` to config/load.py, which reports all faults together."""

import argparse
import errno
import importlib
import os
import re
import sys
import textwrap
from contextlib import suppress
from typing import Any, NoReturn

from titanlite.errors import (
    HELP_COLUMNS,
    UserError,
    columns,
    format_table,
    nearest,
    replace_unprintable,
)
from titanlite.version import __version__

COMMANDS = {
    "train": ("titanlite.launch.launcher", "train a model; the same as ./run_train.sh"),
    "config": (
        "titanlite.tools.config",
        "print the resolved config, its mesh, or the schema of all configs",
    ),
    "models": ("titanlite.tools.models", "list the models, their flavors and fields"),
    "data": ("titanlite.tools.data", "tokenize text into shards on all cores, and inspect them"),
    "checkpoint": ("titanlite.tools.checkpoint", "inspect, export and import checkpoints"),
    "generate": ("titanlite.tools.generate", "generate text from a checkpoint"),
    "evaluate": ("titanlite.tools.evaluate", "compute the loss of a checkpoint on any data set"),
    "init": ("titanlite.tools.init", "start a project: a model with its table, config and test"),
    "tour": (
        "titanlite.tools.tour",
        "train, kill, resume on another mesh and export a run in 3 minutes",
    ),
    "verify": ("titanlite.verify.command", "compare training on every mesh with one process"),
    "plan": (
        "titanlite.tools.plan",
        "memory, communication and speed of a config on any mesh, without a GPU",
    ),
    "doctor": (
        "titanlite.tools.doctor",
        "compare the ranks and time their network, for a bug report",
    ),
    "profile": ("titanlite.tools.profile", "show where the time of a training step goes"),
    "top": ("titanlite.tools.top", "show a run in the terminal: curves, ranks, saves, restarts"),
    "report": ("titanlite.tools.report", "write a run as one page, to send to a colleague"),
    "plot": ("titanlite.tools.plot", "draw the curves of one or several runs"),
}
OVERVIEW = f"""\
titanlite {__version__}: pretraining that you can read in a day and check on your laptop

usage: titanlite COMMAND …

{format_table([(name, summary) for name, (_, summary) in COMMANDS.items()], indent=2)}

`titanlite COMMAND --help` shows a command's options with an example; \
`titanlite train --help` every config key.
"""
OVERRIDES_HELP = """
Config keys are options too: [--config FILE.toml …] [--section.key VALUE …]; \
`titanlite train --help` lists them.
"""
NO_BUG = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP)


def run() -> NoReturn:
    """Run the command as a process."""
    replace_unprintable()
    code = main(sys.argv[1:])
    # The workers have exited, and a normal exit with torch loaded takes most of a second.
    if sys.argv[1:2] == ["train"]:
        with suppress(OSError):  # the console may be closed too
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: list[str]) -> int:
    """Run a command and return its exit code: 2 for a user's error, printed as one message; 130 for
    Ctrl-C.
    """
    arguments = argparse.Namespace()
    code = 0
    try:
        if argv[:1] == ["help"] and argv[1:]:
            argv = [*argv[1:], "--help"]
        if not argv or argv[0] in ("--help", "-h", "help"):
            print(wrap(OVERVIEW, columns(HELP_COLUMNS)), end="")
        elif argv[0] in ("--version", "version"):
            print(f"titanlite {__version__}")
        else:
            command = _command(argv[0])
            arguments, overrides = parse_options(argv[0], command, argv[1:])
            arguments.argv = argv
            code = command.run(arguments, overrides)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(fit(f"titanlite: {error}"), file=sys.stderr)
        return error.code
    except BrokenPipeError:  # `titanlite … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in NO_BUG or not error.filename:
            raise
        print(f"titanlite: {error.strerror}: {error.filename}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        further = ""
        if getattr(arguments, "resumable", False):
            further = "; the same command continues from here"
        print(f"\ntitanlite: stopped{further}", file=sys.stderr)
        return 130
    except SystemExit as done:  # how argparse ends after --help
        return int(done.code or 0)


def _command(name: str) -> Any:
    """Import a command's module."""
    if name not in COMMANDS:
        close = nearest(name, [*COMMANDS, "help"])
        hint = f"did you mean '{close}'?" if close else f"commands are: {', '.join(COMMANDS)}"
        raise UserError(f"unknown command '{name}'; {hint}")
    return importlib.import_module(COMMANDS[name][0])


class _Page(argparse.RawDescriptionHelpFormatter):
    """Help whose paragraphs are as wide as the terminal, like the rest of argparse's help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=columns(HELP_COLUMNS))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap(text, width)


def wrap(text: str, width: int) -> str:
    """Wrap the paragraphs of a text, but not indented lines and examples."""
    text = re.sub(r"(?<=\S)\n(?=\S)(?!example)", " ", text)
    return re.sub(
        "(?m)^(?! |example).+",
        lambda line: textwrap.fill(line[0], width, break_on_hyphens=False),
        text,
    )


def fit(message: str) -> str:
    """Break lines wider than the terminal after punctuation, so that commands stay whole."""
    options: Any = {"width": columns(), "break_long_words": False, "break_on_hyphens": False}
    lines: list[str] = []
    for line in message.splitlines():
        glued = re.sub("(?<![,;:]) |(?<=^titanlite:) ", "\0", line)
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines.append(textwrap.fill(glued, subsequent_indent=indent, **options).replace("\0", " "))
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """argparse, but errors are UserErrors that suggest the nearest spelling."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Page, **options)
        self.set_defaults(parser=self)  # a sub-command's parser replaces its parent's

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            option, value, legal = choice.groups()
            legal = re.sub(r"['\s]", "", legal).split(",")
            close = nearest(value, legal)
            what = "unknown command"
            if option.startswith("-"):
                what = f"{option}: unknown value"
            hint = f"did you mean '{close}'?" if close else f"use {', '.join(legal)}"
            message = f"{what} '{value}'; {hint}"
        message = f"{message.removeprefix('argument ')} (see {self.prog} --help)"
        if "are required" in message:
            message = f"{message}\n{self.format_usage()}".rstrip()
        raise UserError(message)


def _split_keys(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command, and the config keys with their values."""
    own: list[str] = []
    keys: list[str] = []
    takes_files = takes_value = False
    for word in argv:
        name, has_value, _ = word.partition("=")
        is_key = name.startswith("--") and "." in name
        if is_key or name == "--config":
            takes_files = word == "--config"
            takes_value = is_key and not has_value
        elif takes_value and not word.startswith("--"):
            takes_value = False
        elif not takes_files or word.startswith("-"):
            takes_files = takes_value = False
            own.append(word)
            continue
        keys.append(word)
    return own, keys


def parse_options(name: str, command: Any, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's own options, and the config overrides."""
    parser = Parser(
        prog=f"titanlite {name}", description=COMMANDS[name][1], conflict_handler="resolve"
    )
    command.add_arguments(parser)
    if parser.get_default("takes_overrides") and not parser.usage:
        parser.epilog = OVERRIDES_HELP.lstrip() + "\n" + (parser.epilog or "")
    own_words = argv
    keys = list[str]()
    if parser.get_default("takes_overrides"):
        # argparse would mistake the value of a key for an argument.
        own_words, keys = _split_keys(argv)
    arguments, rest = parser.parse_known_args(own_words)
    own = re.findall(r"--([a-z][\w.-]*)", arguments.parser.format_usage())
    for word in rest:
        option = word.partition("=")[0]
        close = ""
        if option.startswith("-") and "." not in option:
            close = nearest(option.lstrip("-"), own)
        if close and option != "--config":
            raise UserError(
                f"unknown option {option}; "
                f"did you mean --{close}? (see {arguments.parser.prog} --help)"
            )
    if rest and not getattr(arguments, "takes_overrides", False):
        raise UserError(
            f"unexpected arguments: {' '.join(rest)} (see {arguments.parser.prog} --help)"
        )
    return arguments, [*rest, *keys]
