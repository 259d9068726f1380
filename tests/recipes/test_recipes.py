"""The recipes for schedulers are what these schedulers read; ./scripts/recipes_check.sh has their
packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.jobs import TINY
from tests.messages import says
from tests.runs import ROOT, environment, records
from titanlite.errors import CUT_SHORT, GIVEN_UP, REFUSED, STOPPED

pytestmark = pytest.mark.long
SCRIPTS = ROOT / "scripts"
REASON = "needs the extra `recipes`: ./scripts/recipes_check.sh has it"


def test_shellcheck_has_no_remark():
    if not shutil.which("shellcheck"):
        pytest.skip(REASON)
    scripts = [*SCRIPTS.rglob("*.sh"), *SCRIPTS.rglob("*.slurm"), *ROOT.glob("benchmarks/*.sh")]
    command = ["shellcheck", "--external-sources", *scripts, "run_train.sh", ".ci/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def jobset() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason=REASON)
    return yaml.safe_load((SCRIPTS / "k8s" / "jobset.yaml").read_text())


def test_jobset_knows_every_field_of_the_recipe(jobset):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=REASON)

    def leaves(value: Any, path: str = "") -> set[tuple[str, Any]]:
        if not isinstance(value, dict | list):
            return {(path, value)}
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {leaf for key, inner in parts for leaf in leaves(inner, f"{path}.{key}")}

    read = models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()
    assert leaves(jobset) <= leaves(read), "a field that it does not know, it drops"


def test_kubernetes_takes_the_job_of_the_jobset(jobset):
    validate = pytest.importorskip("kubernetes_validate", reason=REASON)
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}}
    validate.validate(job | replicated["template"], validate.latest_version(), strict=True)


def test_the_jobset_agrees_with_itself_and_with_the_exit_codes(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container, *_) = job["template"]["spec"]["containers"]
    environ = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environ["NNODES"] == str(job["completions"]) == str(job["parallelism"])
    name = jobset["metadata"]["name"]
    assert environ["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    rules = job["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert codes["Ignore"]["values"] == [STOPPED, CUT_SHORT]
    assert codes["FailJob"]["values"] == [REFUSED, GIVEN_UP]
    assert {rule["containerName"] for rule in codes.values()} == {container["name"]}


@pytest.mark.parametrize(
    ("scheduler", "master"),
    [
        ("slurm", "SLURM_JOB_NODELIST_HET_GROUP_0"),
        ("kubernetes -cfg queue=default,validate_spec=False", "VC_NODE_0_HOSTS"),
    ],
)
def test_torchx_starts_a_launcher_on_each_node(scheduler, master, tmp_path):
    pytest.importorskip("torchx", reason=REASON)
    torchx = [sys.executable, "-m", "torchx.cli.main", "run", "--dryrun", "--workspace", ""]
    component = f"{SCRIPTS / 'torchx' / 'titanlite.py'}:train --image titanlite --nodes 2"
    command = [*torchx, "-s", *scheduler.split(), *component.split()]
    job = ["--", "--config", "llama_8b.toml", "--model.freeze", '["a b"]']
    done = subprocess.run([*command, *job], cwd=tmp_path, capture_output=True, text=True)
    request = done.stdout.partition("=== SCHEDULER REQUEST ===")[2]
    assert done.returncode == 0, done.stderr
    says(request, f"MASTER_ADDR=${{{master}:-localhost}} exec titanlite train --config")
    assert request.count("exec titanlite train --config") == 2


def test_skypilot_takes_the_recipe(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # it writes there
    sky = pytest.importorskip("sky", reason=REASON)
    task = sky.Task.from_yaml(str(SCRIPTS / "skypilot" / "train.yaml"))
    (resources,) = task.resources
    assert task.num_nodes == 2 and resources.job_recovery["recover_on_exit_codes"] == [75, 76]


def test_ray_trains_on_a_cluster_of_two_nodes(tmp_path):
    pytest.importorskip("ray", reason=REASON)
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        job = ["--nodes=2", "--gpus=0", "--cpus=1", "--", *TINY, f"--job.dump_folder={tmp_path}"]
        environ = environment(RAY_ADDRESS=cluster.address, RAY_USAGE_STATS_ENABLED="0")
        train = [sys.executable, "scripts/ray/train.py", *job]
        done = subprocess.run(train, cwd=ROOT, env=environ, capture_output=True, text=True)
    finally:
        cluster.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert "NODE_RANK 1 (2 nodes" in done.stdout, done.stdout
