"""`titanlite config`: the resolved config, its mesh, and the schema of all configs."""

import os
from argparse import ArgumentParser, Namespace

from titanlite.config.docs import json_schema, markdown
from titanlite.config.job import Job, job_from
from titanlite.config.load import load_config, parse_command_line
from titanlite.config.options import declare, positive_int
from titanlite.config.pipeline_order import describe
from titanlite.config.toml import to_toml
from titanlite.errors import UserError, counted
from titanlite.runtime.cluster import read_number

_ABOUT = """Print the config that `titanlite train` would run with the same options: files and \
command line merged, checked, with all defaults. Or print the part that an option below selects. \
No process is started and no GPU is needed, so a laptop can check the layout of a cluster."""


_SHOWS = {
    "--schedule": "print which groups of parameters FSDP2 gathers ahead of their turn, "
    "forward and backward, as set by the fsdp_ keys of [parallelism]",
    "--placements": "print the mesh: groups of ranks, and how many nodes they cross "
    "(NGPU: ranks of a node, default 8); then the techniques that are applied, "
    "and each parameter's split and shape on rank 0",
    "--pipeline": "print the stages of pipeline parallel: their modules, "
    "each rank's actions in a step, and the bubble",
    "--schema": "print the JSON schema for editors that complete and check configs: "
    "titanlite/config/config.schema.json",
    "--markdown": "print every key with its default, legal values and meaning: docs/config.md",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.set_defaults(takes_overrides=True)
    parser.description = _ABOUT
    parser.epilog = "example: titanlite config --config llama_8b.toml --world 8 --placements"
    about = "check and show the config for N ranks: degrees of -1 and the batch follow from N. "
    about += "Default: the fewest ranks that the degrees allow"
    declare(parser, {"--world N": (about, positive_int)})
    declare(parser.add_mutually_exclusive_group(), _SHOWS)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Print the resolved config, or the part that an option selects."""
    if arguments.schema:
        print(json_schema(), end="")
        return 0
    if arguments.markdown:
        print(markdown(), end="")
        return 0
    loaded = load_config(parse_command_line(overrides, os.environ))
    job = job_from(loaded, world=arguments.world, training=False)
    if arguments.schedule:
        from titanlite.parallel import fsdp_schedule

        rules = job.spec.rules(job.model_config)
        print(fsdp_schedule.schedule(job, tied=any(rule.tied for rule in rules)))
    elif arguments.pipeline:
        print(_pipeline(job))
    elif arguments.placements:
        from titanlite.planner import placements

        given = read_number(os.environ, "NGPU", 0)
        print(placements.describe(job, given or min(8, job.layout.world)))
    else:
        ranks = counted(job.layout.world, "rank")
        print(f"# {job.config.model.name} {job.config.model.flavor} on {ranks}: {job.layout}")
        for notice in (*loaded.notices, *job.remarks):
            print(f"# {notice}")
        print(to_toml(job.given), end="")
    return 0


def _pipeline(job: Job) -> str:
    """Describe the stages of a job, and their schedule."""
    if job.layout.pp == 1:
        raise UserError(
            "--pipeline shows stages, and parallelism.pipeline_parallel_degree is 1; raise it"
        )
    from titanlite.parallel.pipeline_parallel import orders

    return describe(job.stages, orders(job.stages))
