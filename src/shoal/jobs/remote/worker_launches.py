"""How the workers of a run are started, with the run's directory or without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from shoal.fleet.control_server import ControlServer
from shoal.fleet.engine import Launch
from shoal.jobs.remote.code_archive import pack_code
from shoal.jobs.remote.file_service import FileService
from shoal.net.address import format_address
from shoal.spec.job import Job
from shoal.spec.remote.file_requests import RemoteRun
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

WORKER_MODULE = "shoal.train.worker"
TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
KEY_VARIABLE = "SHOAL_SEAT_KEY"


class WorkerLaunches(Protocol):
    """Belongs to the driver's thread."""

    def launch(self, seat: int) -> Launch: ...

    def welcome(self) -> dict[str, Any]:
        """What a worker of the engine gets with its welcome, besides job and seat."""

    def admit(self, seat: int) -> None:
        """The worker in this seat belongs to the run now."""

    def dismiss(self, seat: int) -> None:
        """It does not any more, whether it lives or not."""

    def close(self) -> None: ...


class DirectoryLaunches:
    """Workers that open the run's directory themselves."""

    def __init__(self, paths: RunPaths, *, trace: bool = False) -> None:
        self._arguments = ("--run", str(paths.root), *(["--trace"] if trace else []))

    def launch(self, seat: int) -> Launch:
        return Launch(Seat(number=seat), WORKER_MODULE, self._arguments)

    def welcome(self) -> dict[str, Any]:
        return {}

    def admit(self, seat: int) -> None:
        pass

    def dismiss(self, seat: int) -> None:
        pass

    def close(self) -> None:
        pass


class RemoteLaunches:
    """Workers that have nothing but an address, the token and the key of their seat. They get the job's code, and send
    checkpoints, the model and the trace, through the driver's port."""

    def __init__(self, job: Job, paths: RunPaths, control: ControlServer, *, token: str, trace: bool = False) -> None:
        self._job = job
        self._control = control
        self._token = token
        archive = pack_code(Path(job.base_dir), paths.code)
        store_name = paths.parent_run.name
        self._run = RemoteRun(code=archive, store_name=store_name, namespace=paths.checkpoint_namespace, trace=trace)
        where = job.checkpoint.path
        store = paths.store(None if where and "://" in where else where)
        self._files = FileService(paths, checkpoints=store, code=paths.code, holds_key=control.holds_key)
        control.open_door("files", self._files.serve)

    def launch(self, seat: int) -> Launch:
        told = told_address(self._job, self._control)
        secured = ("--tls", self._job.network.tls) if self._job.network.tls else ()
        # never in an argument, which other users can read
        secrets = {TOKEN_VARIABLE: self._token, KEY_VARIABLE: self._control.key(f"worker-{seat}")}
        arguments = ("--join", told, "--trust-code", *secured)
        return Launch(Seat(number=seat), WORKER_MODULE, arguments, environment=secrets, reach=told)

    def welcome(self) -> dict[str, Any]:
        return {"remote": self._run.model_dump(mode="json")}

    def admit(self, seat: int) -> None:
        self._files.admit(seat)

    def dismiss(self, seat: int) -> None:
        self._files.dismiss(seat)

    def close(self) -> None:
        self._files.close()


def told_address(job: Job, control: ControlServer) -> str:
    """The address that workers are told: where the driver listens, unless the job says how others reach it."""
    return format_address(job.network.advertise or control.host, control.port)
