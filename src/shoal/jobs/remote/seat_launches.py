"""How the workers and servers of a run are started, with the run's directory or without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from shoal.fleet.control_server import ControlServer
from shoal.fleet.engine import Launch
from shoal.fleet.process_main import KEY_VARIABLE, TOKEN_VARIABLE
from shoal.jobs.fork_servers import SERVER_MODULE, WORKER_MODULE
from shoal.jobs.remote.code_archive import pack_code, pack_weights
from shoal.jobs.remote.file_service import FileService
from shoal.net.address import format_address
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.remote.file_requests import JOB_FILE, RemoteRun, SentWeights
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat


class SeatLaunches(Protocol):
    """Belongs to the driver's thread."""

    def launch(self, seat: Seat) -> Launch: ...

    def welcome(self) -> dict[str, Any]:
        """What a worker of the engine gets with its welcome, besides job and seat."""

    def admit(self, seat: int) -> None:
        """The process in this seat belongs to the run now."""

    def dismiss(self, seat: int) -> None:
        """It does not any more, whether it lives or not."""

    def close(self) -> None: ...


class DirectoryLaunches:
    """Processes that open the run's directory themselves."""

    def __init__(self, paths: RunPaths, *, trace: bool = False, server_module: str = "") -> None:
        self._server_module = server_module or SERVER_MODULE
        self._arguments = ("--run", str(paths.root), *(["--trace"] if trace else []))

    def launch(self, seat: Seat) -> Launch:
        return Launch(seat, self._server_module if seat.role == "server" else WORKER_MODULE, self._arguments)

    def welcome(self) -> dict[str, Any]:
        return {}

    def admit(self, seat: int) -> None:
        pass

    def dismiss(self, seat: int) -> None:
        pass

    def close(self) -> None:
        pass


class RemoteLaunches:
    """Processes that have nothing but an address, the token and the key of their seat. They get the job, its code and
    the weights that it starts from, and send checkpoints, the model and the trace, through the driver's port."""

    def __init__(self, job: Job, paths: RunPaths, control: ControlServer, *, token: str, trace: bool = False) -> None:
        self._job = job
        self._control = control
        self._token = token
        archive = pack_code(Path(job.base_dir), paths.code)
        save_job(job, paths.code / JOB_FILE)
        store_name = paths.parent_run.name
        self._run = RemoteRun(
            code=archive,
            init_from=_pack_weights(job, job.init_from.path if job.init_from else None, paths.code),
            teacher=_pack_weights(job, job.distil.teacher if job.distil else None, paths.code),
            store_name=store_name,
            namespace=paths.checkpoint_namespace,
            trace=trace,
        )
        where = job.checkpoint.path
        self._url = paths.store(where) if where and "://" in where else ""
        store = paths.store(None if self._url else where)
        self._files = FileService(paths, checkpoints=store, code=paths.code, holds_key=control.holds_key)
        control.open_door("files", self._files.serve)

    def launch(self, seat: Seat) -> Launch:
        told = told_address(self._job, self._control)
        # never in an argument, which other users can read
        secrets = {TOKEN_VARIABLE: self._token, KEY_VARIABLE: self._control.key(seat.name)}
        common = ["--join", told, *self._options(tls=self._job.network.tls)]
        if seat.role == "server":
            self._files.admit(seat.number)  # it reads the job before it connects
            arguments = (*common, *self._options(store=self._url))
            return Launch(seat, SERVER_MODULE, arguments, environment=secrets, reach=told)
        arguments = (*common, *self._options(ports=self._job.network.ports), "--trust-code")
        return Launch(seat, WORKER_MODULE, arguments, environment=secrets, reach=told)

    @staticmethod
    def _options(**values: str | None) -> list[str]:
        return [word for name, value in values.items() if value for word in (f"--{name}", value)]

    def welcome(self) -> dict[str, Any]:
        return {"remote": self._run.model_dump(mode="json")}

    def admit(self, seat: int) -> None:
        self._files.admit(seat)

    def dismiss(self, seat: int) -> None:
        self._files.dismiss(seat)

    def close(self) -> None:
        self._files.close()


def _pack_weights(job: Job, path: str | None, target: Path) -> SentWeights | None:
    """Weights at a URL are read there."""
    return None if path is None or "://" in path else pack_weights(Path(job.base_dir) / path, target)


def told_address(job: Job, control: ControlServer) -> str:
    """The address that workers are told: where the driver listens, unless the job says how others reach it."""
    return format_address(job.network.advertise or control.host, control.port)
