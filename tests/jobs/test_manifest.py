"""Manifests: valid by the schemas of Kubernetes, JobSet and KubeRay, and what schemas do not see."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import ShoalError
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
