"""What `mathinterp submit` sends of the files that a job's command line names, and what it refuses to send."""

import io
import os
import shlex
from pathlib import Path
from zipfile import ZipFile

import click
import pytest

from mathinterp.cli.main import main
from mathinterp.cli.options import out_file, out_folder, out_place, place_to_read
from mathinterp.cli.reference import commands
from mathinterp.cluster import submit as submitting
from mathinterp.cluster.given_files import FOLDER, READS
from mathinterp.cluster.submit import pack
from mathinterp.errors import UserError


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current folder, with files of the user's; elsewhere there is the folder that is uploaded."""
    here = tmp_path / "here"
    for name in ("words.jsonl", "data/sums.jsonl", "data/svamp.json", "tuned/adapter_model.safetensors", "tuned/.env"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (tmp_path / "outside.jsonl").write_text("outside")
    project = tmp_path / "project"
    (project / "mathinterp").mkdir(parents=True)
    (project / "mathinterp" / "main.py").write_text("")
    monkeypatch.chdir(here)
    return here


def sent(here: Path, *args: str, job: str = "scan heads") -> tuple[list[str], dict[str, str], str]:
    """The job's words, what is in the upload beside the project, and what is told."""
    scratch = here.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    packed = pack(job, args, here.parent / "project", scratch)
    assert packed.runtime_env["working_dir"] == str(scratch / "working_dir.zip"), "what was measured is what is sent"
    with ZipFile(scratch / "working_dir.zip") as archive:
        names = {name: archive.read(name).decode() for name in archive.namelist() if not name.endswith("/")}
    (scratch / "working_dir.zip").unlink()
    assert names.pop("mathinterp/main.py") == ""
    return packed.entrypoint.partition(" --address auto")[2].split(), names, packed.told


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["--prompts", "words.jsonl"], ["words.jsonl"]),
        (["--prompts=words.jsonl", "--limit", "8"], ["words.jsonl"]),
        (["--prompts", "svamp:data/svamp.json"], ["data/svamp.json"]),
        (["--data", "data/sums.jsonl:0.5", "--data", "words.jsonl:2"], ["data/sums.jsonl", "words.jsonl"]),
        (["--tasks", "two_digit,words.jsonl"], ["words.jsonl"]),
        (["--against", "adapter:tuned"], ["tuned/adapter_model.safetensors"]),
        (["--adapter", "./tuned"], ["tuned/adapter_model.safetensors"]),
        (["--prompts", "two_digit", "--model", "bundled"], []),
        (["--prompts", "nowhere.jsonl"], []),
        (["--store", "/nowhere/data", "--out", "/nowhere/tuned", "--output", "words.jsonl"], []),
    ],
)
def test_a_path_in_the_current_folder_keeps_its_name(here, words, files):
    found, names, told = sent(here, *words)
    assert found == words
    assert names == {name: name for name in files}
    assert ("uploaded with" in told) == bool(files)


def test_other_paths_get_a_name_in_the_upload(here):
    (here / "link.jsonl").symlink_to("../outside.jsonl")
    words = ["--prompts", "../outside.jsonl", "--data", f"{here}/words.jsonl:2", "--held-out", "link.jsonl"]
    found, names, _ = sent(here, *words)
    assert found == ["--prompts", f"{FOLDER}/0/outside.jsonl", "--data", f"{FOLDER}/1/words.jsonl:2", *words[-2:]]
    assert names == {
        f"{FOLDER}/0/outside.jsonl": "outside", f"{FOLDER}/1/words.jsonl": "words.jsonl", "link.jsonl": "outside",
    }  # fmt: skip


def test_folders_and_models_by_their_full_path_are_the_nodes_own(here):
    words = ["--adapter", f"{here}/tuned", "--model", f"{here}/words.jsonl"]
    found, names, told = sent(here, *words)
    assert (found, names) == (words, {})
    assert f"({here}/tuned, {here}/words.jsonl: a path of the cluster's nodes, not sent)" in told


def test_the_module_of_an_experiment_in_the_current_folder_is_sent(here):
    (here / "norms.py").write_text("norms")
    (here / "package").mkdir()
    (here / "package" / "norms.py").write_text("package")
    assert sent(here, job="scan norms:Norms")[1] == {"norms.py": "norms"}
    assert sent(here, job="scan package.norms:Norms")[1] == {"package/norms.py": "package"}
    assert sent(here, job="scan elsewhere:Norms")[1] == {}


def test_of_a_named_folder_travels_too_what_ignore_files_leave_out_of_the_upload(here, monkeypatch):
    monkeypatch.chdir(here.parent / "project")
    for name in (".gitignore", "tuned/adapter_config.json", "tuned/adapter_model.safetensors", "tuned/.env"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("*.safetensors\n")
    found, names, told = sent(here, "--adapter", "tuned")
    assert found == ["--adapter", "tuned"]
    assert sorted(names) == ["tuned/adapter_config.json", "tuned/adapter_model.safetensors"]
    assert "uploaded with tuned" in told


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--prompts", "nofile.jsonl", "--model", "org/name"], "nofile.jsonl"),
        (["--prompts=svamp:data/SVAMP.json"], "svamp:data/SVAMP.json"),
        (["--data", "nofile.jsonl:0.5", "--held-out", "words.jsonl"], "nofile.jsonl"),
        (
            ["--tasks", "two_digit,nofile.jsonl", "--adapter", "gone/", "--model", "./gone"],
            "nofile.jsonl, gone/, ./gone",
        ),
        (["--against", "adapter:gone/x"], "adapter:gone/x"),
        (["--against", "model:org/name"], ""),
        (["--against", "head:17.22,14.19", "--prompts", "two_digit", "--model", "random:llama-7b"], ""),
        (["--prompts", "s3://bucket/words.jsonl", "--store", "/nowhere/nofile.jsonl"], ""),
    ],
)
def test_a_file_that_is_not_here_is_told_before_the_job_is_submitted(here, monkeypatch, words, absent):
    told = []

    class Cluster:
        def __init__(self, address: str) -> None:
            pass

        def submit_job(self, **job) -> None:
            told.append(job["entrypoint"])
            raise RuntimeError("Request failed: enough")

    monkeypatch.setattr(submitting, "JobSubmissionClient", Cluster)
    where = {"working_dir": here.parent / "project", "output": io.StringIO(), "announce": told.append}
    with pytest.raises(UserError, match="enough"):
        submitting.submit("scan heads", words, "http://c:8265", **where)
    assert told[:-1] == ([f"{absent}: no file here, taken as the nodes' own"] if absent else [])
    assert shlex.split(told[-1])[-len(words) :] == words
    told.clear()
    with pytest.raises(UserError, match="enough"):
        submitting.submit("scan norms:Norms", words, "http://c:8265", **where, no_send=True)
    assert len(told) == 1


READ_NOTHING = {  # options of commands on a cluster whose text names no file that is read there
    "address", "answer", "attention-layers", "deep", "deep-layers", "directions", "dtype", "edges", "examples",
    "experiment", "from", "given", "heads", "heads-sql", "host", "iterative", "keep", "ks", "layers", "levels",
    "methods", "mlps", "neurons", "neurons-sql", "only", "operation", "out", "rank-by", "rank-operation", "rates",
    "receiver", "reuse", "sentence", "separator", "service", "show", "sites", "storage", "store", "targets",
    "tensorboard", "trained",
    "token-file",  # which is secret
}  # fmt: skip


def test_every_option_that_reads_a_file_is_known_and_sent() -> None:
    """Each with text for its value either may name one or does not; those that say so themselves do."""
    texts, files = set(), set()
    for _, command in commands(main):
        if not any(option.name == "address" for option in command.params) or command.name == "submit":
            continue
        for option in command.params:
            numbers = click.Choice | click.types.BoolParamType | click.IntRange | click.FloatRange
            if isinstance(option, click.Option) and not isinstance(option.type, numbers):
                texts.add(option.opts[0].lstrip("-"))
                says = (option.metavar or "").startswith(("FILE", "FOLDER")) or option.callback is place_to_read
                if says and option.callback not in (out_file, out_folder, out_place):
                    files.add(option.opts[0].lstrip("-"))
    assert texts == READS | READ_NOTHING
    assert not READS & READ_NOTHING
    assert files <= READS | {"token-file"}


def refused(here: Path, *words: str) -> str:
    with pytest.raises(UserError) as error:
        sent(here, *words)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_secrets_are_never_sent_however_they_are_named(here):
    (here / ".ssh").mkdir()
    for name in (".ssh/config", "id_rsa", "my_token"):
        (here / name).write_text("secret")
    (here / "plain.jsonl").symlink_to("my_token")
    (here / "settings").symlink_to(".ssh")
    for path in ("tuned/.env", "id_rsa", "../here/id_rsa", f"{here}/my_token", "plain.jsonl", ".ssh/config",
                 "settings/config", "data/../my_token", "svamp:my_token", "my_token:2"):  # fmt: skip
        assert "never leave this machine" in refused(here, "--data", path), path
    assert "never leave this machine" in refused(here, "--adapter", "settings")


def test_what_is_no_file_or_too_large_is_refused_before_it_is_packed(here, monkeypatch):
    os.mkfifo(here / "pipe")
    assert "no regular file" in refused(here, "--prompts", "pipe")
    assert "no regular file" in refused(here, "--prompts", "/dev/zero")
    (here / "gone.jsonl").symlink_to("nowhere")
    assert "No such file" in refused(here, "--prompts", "gone.jsonl")
    with open(here / "huge.jsonl", "wb") as huge:
        huge.truncate(3 * 2**30)
    said = refused(here, "--prompts", "huge.jsonl")
    assert "'huge.jsonl' has 3.0 GiB" in said
    assert "with `no_send`" in said
    monkeypatch.setattr(submitting, "UPLOAD_LIMIT", 2**20)
    (here / "random.jsonl").write_bytes(os.urandom(2**20))
    assert "the largest files are random.jsonl (1.0 MiB)" in refused(here, "--prompts", "random.jsonl")


def test_a_name_that_means_two_files_is_refused_and_one_in_the_upload_is_not_sent_twice(here, monkeypatch):
    (here.parent / "project" / "words.jsonl").write_text("the project's")
    assert "give its full path" in refused(here, "--prompts", "words.jsonl")
    assert sent(here, "--prompts", f"{here}/words.jsonl")[1] == {
        "words.jsonl": "the project's", f"{FOLDER}/0/words.jsonl": "words.jsonl",
    }  # fmt: skip
    monkeypatch.chdir(here.parent / "project")
    found, names, told = sent(here, "--prompts", "words.jsonl")
    assert (found, names) == (["--prompts", "words.jsonl"], {"words.jsonl": "the project's"})
    assert "uploaded with" not in told
