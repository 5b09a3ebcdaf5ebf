"""launch/kubernetes.yaml and launch/skypilot.yaml by those projects' own schemas and loaders."""

import argparse
import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtron.config import RunConfig
from tests.faults.test_launch import host_module
from tests.test_architecture import ROOT

KUBERNETES = ROOT / "launch/kubernetes.yaml"
SKYPILOT = ROOT / "launch/skypilot.yaml"
LOAD = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, task.setup, task.run]))
"""


def host_options(words: list[str]) -> argparse.Namespace:
    """Arguments of launch/host.py as its own parser reads them."""
    return host_module().parser().parse_args(words)


def run_config(words: list[str]) -> RunConfig:
    """Of train.py's words."""
    assert words[0] == "train.py"
    path, *keys = [word.removeprefix("--config=") for word in words[1:] if word != "--config"]
    return RunConfig.load(ROOT / path, keys)


def kubernetes() -> dict[str, Any]:
    """Documents of the file by kind."""
    yaml = pytest.importorskip("yaml")
    return {each["kind"]: each for each in yaml.safe_load_all(KUBERNETES.read_text())}


def test_kubernetes_accepts_each_document() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    documents = kubernetes()
    assert set(documents) == {"Service", "PersistentVolumeClaim", "Job"}
    for document in documents.values():
        validate.validate(document, validate.latest_version(), strict=True)


def test_kubernetes_schema_refuses_a_misspelt_key() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = copy.deepcopy(kubernetes()["Job"])
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError, match="completionsMode"):
        validate.validate(job, validate.latest_version(), strict=True)


def test_pods_of_kubernetes_find_each_other_and_train() -> None:
    documents = kubernetes()
    name = documents["Job"]["metadata"]["name"]
    job, service = documents["Job"]["spec"], documents["Service"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    options = host_options(
        [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    )
    assert container["command"] == ["python3", "launch/host.py"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options.head == f"{name}-0.{pod['subdomain']}"
    assert int(options.nnodes) == job["completions"] == job["parallelism"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    config = run_config(options.words)
    assert config.faults.stop_seconds < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert config.run.dir.startswith(mounts["runs"])
    assert config.checkpoint.interval > 0


def test_skypilot_loads_the_task_and_hosts_find_each_other(tmp_path: Path) -> None:
    if importlib.util.find_spec("sky") is None:
        pytest.skip("could not import 'sky' (skypilot)")
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(SKYPILOT)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    nodes, accelerators, setup, run = json.loads(done.stdout.splitlines()[-1])
    assert "pip install -e ." in setup
    (gpus,) = accelerators.values()
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    place = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_RANK": "1"}
    place |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus)}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", run], env={**os.environ, **place, **path}, capture_output=True, text=True
    )
    script, *words = done.stdout.splitlines()
    assert script == "launch/host.py"
    options = host_options(words)
    assert (options.nnodes, options.node_rank, options.head) == ("2", 1, "10.0.0.1")
    assert (options.local_addr, options.nproc_per_node) == ("10.0.0.2", str(gpus))
    config = run_config(options.words)
    assert config.checkpoint.dir.startswith("s3://")
    assert config.checkpoint.interval > 0
