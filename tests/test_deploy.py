"""deploy/: files for machines of one's own, for Kubernetes and for containers, checked without any of them."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config

from mathinterp.cli.main import main
from mathinterp.cluster import ray_cluster

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
MANIFESTS = ("rayjob.yaml", "rayjob-service.yaml")
SCHEMA = json.loads((ROOT / "tests" / "kuberay" / "rayjob.schema.json").read_text())
SERVICE_SCHEMA = json.loads((ROOT / "tests" / "kuberay" / "service.schema.json").read_text())


@pytest.fixture(params=MANIFESTS)
def job(request) -> dict[str, Any]:
    """The RayJob of a manifest."""
    return rayjob(request.param)


def rayjob(name: str) -> dict[str, Any]:
    (found,) = [each for each in yaml.safe_load_all((DEPLOY / name).read_text()) if each["kind"] == "RayJob"]
    return found


def kubernetes_service() -> dict[str, Any]:
    """The Service of rayjob-service.yaml."""
    manifest = (DEPLOY / "rayjob-service.yaml").read_text()
    (found,) = [each for each in yaml.safe_load_all(manifest) if each["kind"] == "Service"]
    return found


def parsed(words: list[str]) -> tuple[click.Command, dict[str, Any]]:
    """The command that an entry point calls, and its options; a usage error where it could not be called."""
    command, context = main, click.Context(main)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, name
        command = found
    return command, command.make_context(command.name, words).params


def test_the_launcher_accepts_the_on_prem_file():
    raw = yaml.safe_load((DEPLOY / "cluster-onprem.yaml").read_text())
    config = prepare_config(copy.deepcopy(raw))
    assert validate_config(config) is None  # it raises where it does not
    with pytest.raises(Exception, match="Additional properties"):
        validate_config({**config, "no_such_key": 1})
    node = config["available_node_types"]["local.cluster.node"]
    assert node["min_workers"] == node["max_workers"] == len(raw["provider"]["worker_ips"]) == raw["max_workers"]


def test_the_on_prem_file_installs_the_project_and_states_its_authentication():
    config = prepare_config(yaml.safe_load((DEPLOY / "cluster-onprem.yaml").read_text()))
    assert config["rsync_filter"] == [".gitignore", ".rayignore"]
    (target,) = [remote for remote, local in config["file_mounts"].items() if local == "."]
    (install,) = [command for command in config["worker_setup_commands"] if "pip install" in command]
    assert f"--constraint {target}/constraints.txt --editable {target}'[s3,gcs]'" in install
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [command for command in starts if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token ray start" in command for command in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]


def test_kubernetes_accepts_the_manifests(job):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(job, SCHEMA)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["spec", "entrypoynt"], "x"),
        (["spec", "backoffLimit"], "three"),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "secret"),
        (["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers"], None),
        (["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "container"], []),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas"], "4"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "groupName"], 7),
    ],
)
def test_faulty_manifests_would_not_be_accepted(place, value):
    faulty = rayjob("rayjob.yaml")
    *above, last = place
    node = faulty
    for key in above:
        node = node[key]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(faulty, SCHEMA)


def test_kubernetes_accepts_the_service():
    jsonschema.Draft202012Validator.check_schema(SERVICE_SCHEMA)
    jsonschema.validate(kubernetes_service(), SERVICE_SCHEMA)
    kinds = {each["kind"] for name in MANIFESTS for each in yaml.safe_load_all((DEPLOY / name).read_text())}
    assert kinds == {"RayJob", "Service"}, "each kind has its schema"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["apiVersion"], "v2"),
        (["metadata", "name"], "mathinterp_service"),
        (["metadata", "lables"], {}),
        (["spec", "selektor"], {"app": "x"}),
        (["spec", "selector", "app"], 1),
        (["spec", "type"], "LoadBalanced"),
        (["spec", "ports", 0, "port"], "8390"),
        (["spec", "ports", 0, "port"], 83900),
        (["spec", "ports", 0, "targetport"], 8390),
        (["spec", "ports", 0, "name"], "The Service"),
    ],
)
def test_faulty_services_would_not_be_accepted(place, value):
    faulty = kubernetes_service()
    *above, last = place
    node = faulty
    for key in above:
        node = node[key]
    node[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(faulty, SERVICE_SCHEMA)


def test_manifests_run_as_a_user_on_the_ray_of_the_constraints(job):
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == PINS["ray"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len({container["image"] for pod in pods for container in pod["containers"]}) == 1
    assert all(pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] for pod in pods)


def test_the_scan_of_the_job_is_one_that_the_command_line_takes():
    command, options = parsed(shlex.split(rayjob("rayjob.yaml")["spec"]["entrypoint"])[1:])
    assert command.name == "heads"
    assert (options["address"], options["store"]) == ("auto", "s3://BUCKET/results")


def test_the_service_of_the_manifest_is_one_that_the_command_line_takes():
    service = kubernetes_service()
    _, options = parsed(shlex.split(rayjob("rayjob-service.yaml")["spec"]["entrypoint"])[1:])
    head = rayjob("rayjob-service.yaml")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == port["port"] == options["port"]
    assert options["port"] in [each["containerPort"] for each in head["spec"]["containers"][0]["ports"]]
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()


def test_replicas_may_count_on_pods_that_kuberay_will_add(monkeypatch, tmp_path):
    """As its autoscaler reads the RayCluster: Kubernetes answers with what the operator makes of rayjob.yaml."""
    asked = []

    class Kubernetes:
        def __init__(self, namespace: str):
            self.namespace = namespace

        def get(self, path: str) -> dict[str, Any]:
            asked.append((self.namespace, path))
            spec = rayjob("rayjob.yaml")["spec"]["rayClusterSpec"]
            return {"metadata": {"name": "scan-x", "namespace": self.namespace}, "spec": spec}

    monkeypatch.setattr(autoscaling_config.node_provider, "KubernetesHttpApiClient", Kubernetes)
    monkeypatch.setattr(ray_cluster, "BOOTSTRAP_FILE", tmp_path / "none")
    monkeypatch.setenv("RAY_CLUSTER_NAME", "scan-x")
    monkeypatch.setenv("RAY_CLUSTER_NAMESPACE", "lab")
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 0.0}}])
    monkeypatch.setattr(ray_cluster.ray, "cluster_resources", lambda: {})
    ray_cluster._kuberay_config.cache_clear()
    assert ray_cluster.gpus_each(None) == 1
    placement = ray_cluster.place(None, 1, 64, 10**6)
    assert (placement.replicas, placement.device, placement.cpus) == (4, "cuda", 1)
    assert asked == [("lab", "rayclusters/scan-x")], "asked once"
    ray_cluster._kuberay_config.cache_clear()


def test_kubernetes_that_does_not_answer_leaves_the_nodes_that_are_there(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(ray_cluster, "BOOTSTRAP_FILE", tmp_path / "none")
    monkeypatch.setenv("RAY_CLUSTER_NAME", "scan-x")
    monkeypatch.setenv("RAY_CLUSTER_NAMESPACE", "lab")
    ray_cluster._kuberay_config.cache_clear()
    assert ray_cluster.node_groups() == []  # there is no account of a pod here
    assert "RayCluster scan-x cannot be read" in caplog.text
    ray_cluster._kuberay_config.cache_clear()


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_image_has_the_ray_and_python_of_the_project_and_no_root():
    values = dict(instructions())
    assert values["ARG"].startswith(f"BASE=rayproject/ray:{PINS['ray']}-py{sys.version_info[0]}{sys.version_info[1]}-")
    assert values["ARG"].removeprefix("BASE=") == yaml.safe_load((ROOT / "cluster.yaml").read_text())["docker"]["image"]
    assert values["USER"].isdigit()
    assert (
        int(values["USER"])
        == rayjob("rayjob.yaml")["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["securityContext"][
            "runAsUser"
        ]
    )
    assert parsed(["scan", "heads", "--limit", "8"])[0].name == "heads"
    assert json.loads(values["CMD"])[0] == "mathinterp"


def copied() -> list[str]:
    """Names of the project's files that COPY takes."""
    words = [rest.split() for kind, rest in instructions() if kind == "COPY" and "--from" not in rest]
    return [word for line in words for word in line[:-1] if not word.startswith("--")]


def test_what_the_image_copies_is_there_and_nothing_else_reaches_the_builder():
    assert all((ROOT / name).exists() for name in copied())
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split("\n")
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(copied())


PIP = f"{shlex.quote(sys.executable)} -m pip"
BUILD, INSTALL = [rest for kind, rest in instructions() if kind == "RUN"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """/home/ray after the image's first stage: constraints.txt, and the wheel of what is copied."""
    home = tmp_path_factory.mktemp("home")
    (home / "source").mkdir()
    for name in copied():
        place = home if name == "constraints.txt" else home / "source"
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, place / name)
    said(BUILD.replace("pip wheel", f"{PIP} --isolated wheel --quiet --no-index --no-build-isolation"), home / "source")
    (home / "source" / "dist").rename(home / "dist")
    return home


def said(step: str, folder: Path) -> str:
    """What a step says that ends well."""
    done = subprocess.run(["sh", "-ec", step], cwd=folder, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, (step, done.stdout + done.stderr)
    return done.stdout


def install_step(home: Path, pip: str) -> tuple[str, str]:
    """The image's last step: what installs, with another pip, and what checks it."""
    install, _, check = INSTALL.partition(" && ")
    return install.replace("/home/ray", str(home)).replace("pip install", pip), check


@pytest.mark.slow
def test_the_steps_of_the_image_run_on_what_it_copies(home):
    """With this environment's packages in place of the network's: they must be those of constraints.txt."""
    install, check = install_step(home, f"{PIP} --isolated install --no-index --dry-run")
    assert "[s3,gcs]" in install
    assert "Would install mathinterp-0.1.0" in said(install.replace("[s3,gcs]", ""), home)
    assert "mathinterp, version 0.1.0" in said(f"{Path(sys.executable).parent}/{check}", home)


@pytest.mark.slow
def test_the_extras_of_the_image_resolve_to_the_pins_of_the_constraints(home):
    """Where a package index can be reached, whichever pip is set up for: nothing is installed."""
    wanted = ("--no-deps", "--quiet", "--dest", str(home / "asked"), f"s3fs=={PINS['s3fs']}")
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "--timeout", "10", "--retries", "1", "download", *wanted],
        capture_output=True, text=True,
    )  # fmt: skip
    if asked.returncode and "Could not find" in asked.stderr and "from versions: none" in asked.stderr:
        pytest.skip("no package index can be reached")
    assert asked.returncode == 0, asked.stderr
    install, _ = install_step(home, f"{PIP} install --dry-run --quiet --report {home / 'report.json'}")
    said(install, home)
    report = json.loads((home / "report.json").read_text())
    found = {each["metadata"]["name"]: each["metadata"]["version"] for each in report["install"]}
    for name in ("s3fs", "gcsfs"):
        there = found.get(name) or version(name)  # of this environment, which has it already
        assert there == PINS[name], name
