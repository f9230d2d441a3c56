"""cluster.yaml: valid for the launcher, installs this project, starts from no GPUs, states its authentication."""

import copy
import json
import re
import tomllib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

from mathinterp.cluster import ray_cluster

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def raw() -> dict:
    return yaml.safe_load((ROOT / "cluster.yaml").read_text())


@pytest.fixture(scope="module")
def config(raw) -> dict:
    """As `ray up` fills it in, offline."""
    return prepare_config(copy.deepcopy(raw))


def test_the_launcher_accepts_it(config):
    assert validate_config(config) is None  # it raises where it does not


def test_an_unknown_key_would_not_be_accepted(config):
    with pytest.raises(Exception, match="Additional properties"):
        validate_config({**config, "no_such_key": 1})


def test_gpu_nodes_come_and_go(config):
    workers = [kind for kind in config["available_node_types"].values() if kind["resources"].get("GPU")]
    assert workers
    assert all(kind["min_workers"] == 0 < kind["max_workers"] <= config["max_workers"] for kind in workers)
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["GPU"] == 0
    assert head["max_workers"] == 0


def test_set_up_installs_this_project_on_every_node(config):
    (target,) = [remote for remote, local in config["file_mounts"].items() if local == "."]
    for node in ("head_setup_commands", "worker_setup_commands"):
        (install,) = [command for command in config[node] if "pip install" in command and target in command]
        assert f"--constraint {target}/constraints.txt" in install
        assert f"--editable '{target}[s3,gcs]'" in install  # the example's store is s3://
    assert (ROOT / "constraints.txt").is_file()
    assert (ROOT / "pyproject.toml").is_file()


def test_replicas_may_write_the_store_of_the_example(config):
    """Ray gives its instance profile to the head node alone, and the head node no right to hand it on."""
    text = (ROOT / "cluster.yaml").read_text()
    assert "--store s3://" in text
    source = Path(find_spec("ray.autoscaler._private.aws.config").origin).read_text()  # importing it would need boto3
    assert 'RAY = "ray-autoscaler"\nDEFAULT_RAY_INSTANCE_PROFILE = RAY + "-v1"\n' in source
    profile = "ray-autoscaler-v1"
    workers = [kind for kind in config["available_node_types"].values() if kind["max_workers"]]
    assert [kind["node_config"]["IamInstanceProfile"] for kind in workers] == [{"Name": profile}]
    (role, policy) = re.search(r"put-role-policy --role-name (\S+) .*\\\n#\s+'(.*)'\n", text).groups()
    allowed = json.loads(policy)["Statement"]
    assert (role, allowed["Effect"], allowed["Action"]) == (profile, "Allow", "iam:PassRole")
    assert allowed["Resource"].endswith(f":role/{profile}")


def test_no_secret_of_the_project_travels_but_the_clusters_own_token_does(config):
    assert config["rsync_filter"] == [".gitignore", ".rayignore"]  # rules for the folders that have these files
    token = config["file_mounts"]["/home/ray/.ray/auth_token"]
    assert not any(fnmatch(part, rule) for rule in config["rsync_exclude"] for part in Path(token).parts[1:])


def test_the_image_has_a_ray_that_the_project_takes(raw):
    version = raw["docker"]["image"].partition(":")[2].split("-")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [Requirement(line) for line in project["dependencies"] if Requirement(line).name == "ray"]
    assert version in wanted.specifier
    pins = re.findall(r"^ray(?:\[.*\])?==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pins in ([], [version])


def test_every_start_states_the_authentication_mode(config):
    starts = [
        command
        for commands in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[commands]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token ray start" in command for command in starts)
    assert "/home/ray/.ray/auth_token" in config["file_mounts"]


def test_replicas_may_count_on_nodes_that_the_autoscaler_will_add(config, tmp_path, monkeypatch):
    bootstrap = tmp_path / "ray_bootstrap_config.yaml"
    bootstrap.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(ray_cluster, "BOOTSTRAP_FILE", bootstrap)
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: {"CPU": 2.0})
    assert ray_cluster.gpus_each(None) == 1
    placement = ray_cluster.place(None, 1, 64, 10**6)
    assert (placement.replicas, placement.device, placement.cpus) == (4, "cuda", 1)
    assert ray_cluster.place(None, 0.5, 64, 10**6).replicas == 8
