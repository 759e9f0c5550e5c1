"""Kubernetes objects for a job: plain data, which `shoal manifest` prints as YAML. Nothing here talks to a cluster."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.errors import EXIT_DATA, EXIT_JOB, EXIT_TRAIN, error
from shoal.net.handshake import new_token
from shoal.spec.job import MAX_WORKERS, Job

Kind = Literal["rayjob", "jobset"]
KINDS: tuple[Kind, ...] = ("rayjob", "jobset")
DRIVER_PORT = 29400
RUNS_DIR = "/runs"
GRACE_S = 120
"""How long a pod may take to leave: others need its state first."""
JOIN_WAIT_S = 600
MAX_RESTARTS = 10
_NAME_CHARACTERS = 40
"""Kubernetes allows 63, and JobSet appends to it."""
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9_./:@-]{0,254}")
_MEMORY = re.compile(r"[1-9][0-9]{0,5}(Ki|Mi|Gi|Ti)")
_DIRECTORY = re.compile(r"/[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64}){0,15}")
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_LABEL = "app.kubernetes.io/name"
Object = dict[str, Any]
_POD_IP: Object = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


@dataclass(frozen=True)
class PodSettings:
    """What a job file does not say. `image` has Shoal and, in `directory`, the job's directory. `claim` is a volume
    claim that keeps runs; without one they are lost with the pod."""

    image: str
    job_file: str
    directory: str = "/job"
    memory: str = "4Gi"
    gpus: int = 0
    claim: str = ""
    token: str = field(default_factory=new_token, repr=False)

    def __post_init__(self) -> None:
        checks = [("--image", self.image, _IMAGE), ("--memory", self.memory, _MEMORY)]
        checks += [("--dir", self.directory, _DIRECTORY)]
        checks += [("--claim", self.claim, _CLAIM)] if self.claim else []
        for where, text, form in checks:
            if not form.fullmatch(text):
                raise error("SH690", f"'{text}' cannot be used", where=where, fix="Write it as Kubernetes does.")
        if "/" in self.job_file or not self.job_file:
            raise error("SH690", f"'{self.job_file}' is not the name of a file", where="the job file")


def make_manifest(job: Job, kind: Kind, settings: PodSettings, *, workers: int | None = None) -> list[Object]:
    """The objects to apply, in order. `workers`: how many; left out, the least that the job wants. SH690 or SH110 if
    the job cannot be run in this way."""
    count = job.workers.least if workers is None else workers
    if not 1 <= count <= MAX_WORKERS:
        raise error("SH690", f"{count} workers", where="--workers", fix=f"Ask for 1 to {MAX_WORKERS}.")
    name = object_name(job.name)
    if kind == "rayjob":
        return [ray_job(job, settings, name=name, workers=count)]
    if job.workers_per_replica > 1:
        fix = "Use --kind rayjob: its workers save through the driver."
        raise error("SH110", "workers that join cannot hold shards", where="shard", fix=fix)
    return [token_secret(settings, name=name), job_set(job, settings, name=name, workers=count)]


def object_name(text: str) -> str:
    """A name that Kubernetes takes. SH690 if nothing of it is left."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:_NAME_CHARACTERS].strip("-")
    if not name:
        raise error("SH690", f"'{text}' has no letter or digit", where="name", fix="Give the job another name.")
    return name if name[0].isalpha() else f"job-{name}"


# ---- RayJob ----


def ray_job(job: Job, settings: PodSettings, *, name: str, workers: int) -> Object:
    """A cluster of Ray for this job alone: the driver on its head, workers on its other nodes. KubeRay removes it when
    the job has ended."""
    run = ["run", settings.job_file, "--engine", "ray", "--runs", RUNS_DIR]
    # KubeRay pastes it into a command line of another pod: there it is three words, and a shell of the head gets them
    entrypoint = shlex.join(["sh", "-c", _drive(job, settings, run)])
    most = min(max(workers, job.workers.most), MAX_WORKERS)
    group = {
        "groupName": "workers",
        "replicas": workers,
        "minReplicas": min(workers, job.workers.least),
        "maxReplicas": most,
        "rayStartParams": {},
        "template": {"spec": _pod(job, settings, name="ray-worker", keeps_runs=False)},
    }
    head = _pod(job, settings, name="ray-head", keeps_runs=True)
    head["containers"][0]["env"] = [_POD_IP]
    spec = {
        "entrypoint": entrypoint,
        "backoffLimit": job.elastic.restarts if settings.claim else 0,  # another cluster goes on with the run
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "enableInTreeAutoscaling": most > workers,
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": head}},
            "workerGroupSpecs": [group],
        },
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(name), "spec": spec}


# ---- JobSet ----


def job_set(job: Job, settings: PodSettings, *, name: str, workers: int) -> Object:
    """One pod drives the run and trains; the others join it. It is done when the driver is."""
    port = job.network.port or DRIVER_PORT
    run = ["run", settings.job_file, "--runs", RUNS_DIR, "--workers", "1", "--set", f"network.port={port}"]
    driver = _pod(job, settings, name="driver", keeps_runs=True)
    driver["containers"][0] |= {
        "command": ["sh", "-c", _drive(job, settings, run)],
        "ports": [{"containerPort": port, "name": "driver"}],
        "env": [*_token(name), _POD_IP],
    }
    joined = _pod(job, settings, name="worker", keeps_runs=False)
    joined["containers"][0] |= {
        "command": ["shoal", "join", f"{name}-driver-0-0.{name}:{port}"],
        "args": ["--dir", settings.directory, "--wait", str(JOIN_WAIT_S), "--trust-code"],
        "env": _token(name),
    }
    # what is wrong with the job itself is wrong the next time too
    own_error = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [EXIT_JOB, EXIT_DATA, EXIT_TRAIN]}}
    jobs = [{"name": "driver", "replicas": 1, "template": {"spec": _job(driver, own_error, pods=1)}}]
    if workers > 1:
        jobs.append({"name": "workers", "replicas": 1, "template": {"spec": _job(joined, pods=workers - 1)}})
    fail = {"name": "job_error", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [fail]},
        "replicatedJobs": jobs,
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(name), "spec": spec}


def _job(pod: Object, *rules: Object, pods: int) -> Object:
    """Pods that were taken away do not count as failed. `rules`: what else a pod's end means."""
    taken = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": MAX_RESTARTS * pods,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [taken, *rules]},
        "template": {"spec": pod | {"restartPolicy": "Never"}},
    }


def token_secret(settings: PodSettings, *, name: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(f"{name}-token"),
        "type": "Opaque",
        "stringData": {"token": settings.token},
    }


def _token(name: str) -> list[Object]:
    """Never in an argument, which everybody who may list pods can read."""
    reference = {"name": f"{name}-token", "key": "token"}
    return [{"name": "SHOAL_TOKEN", "valueFrom": {"secretKeyRef": reference}}]


# ---- pods ----


def _metadata(name: str) -> Object:
    return {"name": name, "labels": {_LABEL: "shoal"}}


def _drive(job: Job, settings: PodSettings, run: list[str]) -> str:
    """Shell: a pod that is started again goes on with the run that it finds. Without double quotes: older
    versions of Ray quote them wrongly."""
    first = f"{job.name}-1"
    found = shlex.quote(f"{RUNS_DIR}/{first}/job.yaml")
    resume, anew = (
        f"exec shoal {shlex.join(words)} --set network.listen=$POD_IP"
        for words in (["resume", first, "--runs", RUNS_DIR], run)
    )
    return f"cd {settings.directory} && if [ -e {found} ]; then {resume}; else {anew}; fi"


def _pod(job: Job, settings: PodSettings, *, name: str, keeps_runs: bool) -> Object:
    gpus = {"nvidia.com/gpu": str(settings.gpus)} if settings.gpus else {}
    resources = {"cpu": str(job.threads), "memory": settings.memory} | gpus
    container: Object = {
        "name": name,
        "image": settings.image,
        "resources": {"requests": resources, "limits": dict(resources)},
    }
    pod: Object = {"containers": [container], "terminationGracePeriodSeconds": GRACE_S}
    if keeps_runs:
        container["volumeMounts"] = [{"name": "runs", "mountPath": RUNS_DIR}]
        source = {"persistentVolumeClaim": {"claimName": settings.claim}} if settings.claim else {"emptyDir": {}}
        pod["volumes"] = [{"name": "runs"} | source]
    return pod
