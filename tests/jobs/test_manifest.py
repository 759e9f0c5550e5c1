"""Manifests: valid by the schemas of Kubernetes, JobSet and KubeRay, and what schemas do not see."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import EXIT_DATA, EXIT_JOB, EXIT_TRAIN, ShoalError
from shoal.jobs.remote import manifest
from shoal.jobs.remote.manifest import KINDS, PodSettings, make_manifest, object_name
from shoal.spec.load import make_job
from tests.conftest import MLP

kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")
VERSION = "1.34"
SCHEMAS = Path(__file__).parent / "schemas"
NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def job(**changes):
    return make_job(MLP | changes, base_dir=".", check_names=False)


def check_custom(kind, made):
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(made)


def check_builtin(api, kind, **fields):
    made = {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, **fields}
    kubernetes_validate.validate(made, VERSION, strict=True)


def check(kind, objects):
    for one in objects:
        if one["kind"] == "Secret":
            kubernetes_validate.validate(one, VERSION, strict=True)
            continue
        check_custom(kind, one)
        for pod in pods(one):
            check_builtin("v1", "Pod", spec=pod)
        if kind == "jobset":
            for part in one["spec"]["replicatedJobs"]:
                check_builtin("batch/v1", "Job", spec=part["template"]["spec"])


def pods(one):
    if one["kind"] == "RayJob":
        cluster = one["spec"]["rayClusterSpec"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [group["template"]["spec"] for group in groups]
    return [part["template"]["spec"]["template"]["spec"] for part in one["spec"]["replicatedJobs"]]


@pytest.mark.parametrize("claim", ["", "runs"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_valid(kind, claim):
    pod = PodSettings("registry/shoal:1", "job.yaml", gpus=1, claim=claim)
    check(kind, make_manifest(job(workers="1..3"), kind, pod, workers=3))


@pytest.mark.parametrize("kind", KINDS)
def test_the_schemas_find_a_wrong_field(kind):
    (*_, made) = make_manifest(job(), kind, PodSettings("x", "job.yaml"))
    made["spec"]["parallelizm"] = 1
    with pytest.raises(jsonschema.ValidationError, match="parallelizm"):
        check(kind, [made])
    del made["spec"]["parallelizm"]
    pods(made)[0]["containers"][0]["imaje"] = "x"
    with pytest.raises(Exception, match="imaje"):
        check(kind, [made])


@settings(max_examples=15, deadline=None)
@given(
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,50}", fullmatch=True),
    least=st.integers(1, 4),
    more=st.integers(0, 4),
    workers=st.integers(1, 12),
    port=st.none() | st.integers(1024, 65535),
)
def test_what_schemas_do_not_see(name, least, more, workers, port):
    made = job(name=name, workers=f"{least}..{least + more}", lanes=64, batch_size=64, network={"port": port})
    pod = PodSettings("x", "job.yaml")
    objects = make_manifest(made, "jobset", pod, workers=workers)
    (*secrets, jobset) = objects
    parts = {part["name"]: part["template"]["spec"] for part in jobset["spec"]["replicatedJobs"]}
    assert sum(part["parallelism"] for part in parts.values()) == workers
    assert all(part["parallelism"] == part["completions"] for part in parts.values())
    assert NAME.fullmatch(jobset["metadata"]["name"])
    assert all(len(f"{jobset['metadata']['name']}-{part}-0-99") < 63 for part in parts)
    driver = parts["driver"]["template"]["spec"]["containers"][0]
    listens = driver["ports"][0]["containerPort"]
    assert f"network.port={listens}" in driver["command"][2]
    if "workers" in parts:
        name_of, _, at = parts["workers"]["template"]["spec"]["containers"][0]["command"][2].partition(":")
        assert name_of == f"{jobset['metadata']['name']}-driver-0-0.{jobset['metadata']['name']}"
        assert int(at) == listens
    named = {env["valueFrom"]["secretKeyRef"]["name"] for part in parts.values() for env in tokens(part)}
    assert named == {one["metadata"]["name"] for one in secrets}
    assert pod.token not in json.dumps(jobset)
    (cluster,) = (one["spec"]["rayClusterSpec"] for one in make_manifest(made, "rayjob", pod, workers=workers))
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] == workers <= group["maxReplicas"]


def test_a_jobset_is_not_tried_again_after_an_error_of_the_job():
    """An eviction does not count, and a worker that cannot build the job on its node does not end the run."""
    (_, jobset) = make_manifest(job(workers=2), "jobset", PodSettings("x", "job.yaml"))
    driver, workers = (part["template"]["spec"]["podFailurePolicy"] for part in jobset["spec"]["replicatedJobs"])
    taken, own = driver["rules"]
    assert workers["rules"] == [taken]
    assert (own["action"], own["onExitCodes"]["values"]) == ("FailJob", [EXIT_JOB, EXIT_DATA, EXIT_TRAIN])
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


SUBMITTER = """
until true >/dev/null 2>&1 ; do sleep 2 ; done ; if ! false ; then ray job submit --no-wait -- {entrypoint} ; fi ;
"""
"""What KubeRay runs with `bash -c` in a pod of its own."""


@pytest.mark.parametrize("quote", [shlex.join, subprocess.list2cmdline], ids=["Ray", "older Ray"])
@pytest.mark.parametrize("begun", [False, True])
def test_the_driver_of_a_rayjob_starts_on_the_head_and_nowhere_else(tmp_path, monkeypatch, begun, quote):
    """Through three shells: of KubeRay's pod, of Ray's job on the head, and our own."""
    monkeypatch.setattr(manifest, "RUNS_DIR", str(tmp_path / "runs"))
    (tmp_path / "job").mkdir()
    (tmp_path / "runs" / "mlp-1").mkdir(parents=True)
    if begun:
        (tmp_path / "runs" / "mlp-1" / "job.yaml").touch()
    for name in ("ray", "shoal"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\npwd >>{tmp_path}/{name}.txt\nprintf "%s\\n" "$@" >>{tmp_path}/{name}.txt\n')
        program.chmod(0o755)
    (made,) = make_manifest(job(), "rayjob", PodSettings("x", "my job.yaml", directory=str(tmp_path / "job")))
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    submitter = SUBMITTER.format(entrypoint=made["spec"]["entrypoint"])
    subprocess.run(["bash", "-ec", submitter], env=path | {"POD_IP": "10.0.0.1"}, cwd=tmp_path, check=True)
    assert not (tmp_path / "shoal.txt").exists()
    where, *words = (tmp_path / "ray.txt").read_text().splitlines()
    assert words[:4] == ["job", "submit", "--no-wait", "--"]
    subprocess.run(quote(words[4:]), shell=True, env=path | {"POD_IP": "10.0.0.2"}, cwd="/", check=True)
    where, *words = (tmp_path / "shoal.txt").read_text().splitlines()
    assert where == str(tmp_path / "job")
    runs = ["--runs", str(tmp_path / "runs")]
    asked = ["resume", "mlp-1", *runs] if begun else ["run", "my job.yaml", "--engine", "ray", *runs]
    assert words == [*asked, "--set", "network.listen=10.0.0.2"]


@pytest.mark.parametrize(("claim", "retries"), [("runs", 3), ("", 0)])
def test_a_rayjob_is_tried_again_if_its_run_is_kept(claim, retries):
    (made,) = make_manifest(job(), "rayjob", PodSettings("x", "job.yaml", claim=claim))
    assert made["spec"]["backoffLimit"] == retries


def tokens(part):
    container = part["template"]["spec"]["containers"][0]
    found = [env for env in container["env"] if env["name"] == "SHOAL_TOKEN"]
    assert len(found) == 1
    return found


@given(text=st.text(max_size=80))
def test_every_name_becomes_one_that_kubernetes_takes(text):
    if any(letter.isascii() and letter.isalnum() for letter in text.lower()[:40]):
        assert NAME.fullmatch(object_name(text))


def test_a_name_without_letters_is_told():
    with pytest.raises(ShoalError, match="SH690"):
        object_name("...")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"image": "a b"}, "--image"),
        ({"memory": "lots"}, "--memory"),
        ({"directory": "job; rm"}, "--dir"),
        ({"claim": "A"}, "--claim"),
    ],
)
def test_settings_that_cannot_be_used_are_told(changes, where):
    with pytest.raises(ShoalError, match="SH690") as told:
        PodSettings(**({"image": "x", "job_file": "job.yaml"} | changes))
    assert told.value.where == where


def test_the_command_prints_yaml(job_dir):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(MLP))
    words = ["manifest", str(job_dir / "job.yaml"), "--kind", "jobset", "--image", "shoal:1", "--workers", "2"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    check("jobset", list(yaml.safe_load_all(said.output)))
    assert [one["kind"] for one in yaml.safe_load_all(said.output)] == ["Secret", "JobSet"]
    with pytest.raises(ShoalError, match="there is no kind 'pod'"):
        CliRunner().invoke(app, [*words[:3], "pod", "--image", "x"], catch_exceptions=False)
