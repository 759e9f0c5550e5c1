"""Watchers by short name, besides TensorBoard: csv, mlflow, wandb, lr_finder, profiler."""

from __future__ import annotations

import csv
import importlib
import io
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from shoal.checkpoint.files import atomic_replace
from shoal.errors import error, plural
from shoal.events import Event
from shoal.train.watched import AttachedWorker


def scalars_of(event: Event) -> dict[str, float]:
    """The numbers of an event by name, as `train/loss` or `validation/accuracy`."""
    if event.kind == "step":
        return {"train/loss": float(event["loss"]), "train/lr": float(event["lr"])}
    if event.kind == "evaluated":
        return {f"{event['split']}/{name}": float(value) for name, value in event["metrics"].items()}
    return {}


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as failure:
        fix = f"pip install 'shoal[{extra}]'"
        raise error("SH207", f"{name} cannot be imported: {failure}", where="watchers", fix=fix) from failure


def _check_steps(name: str, needed: int, worker: AttachedWorker, *, fix: str) -> None:
    """SH107 if the run is over before the watcher has done what it is for."""
    if needed > worker.steps:
        message = f"{name} needs {plural(needed, 'step')}, and the run has {worker.steps:,}"
        raise error("SH107", message, where="watchers", fix=fix)


class CsvCurves:
    """`watchers: [csv]`: rows of step, name and value in curves.csv. A resumed run goes on in the same file, where rows
    of steps that it computes again take the place of those that are there."""

    alone = True

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / "curves.csv"
        self._first: int | None = None  # step that this process writes

    def watch(self, event: Event) -> str | None:
        if found := scalars_of(event):
            step = event.step or 0
            if self._first in (None, step):
                self._first = step
                self._drop(step, found)
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows((step, name, repr(value)) for name, value in found.items())
        return None

    def _drop(self, step: int, names: Collection[str]) -> None:
        """Drop what an earlier process wrote of later steps, and of these names at this step; also the end of a row
        that it did not finish."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_bytes().decode() if self._path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        rows = list(csv.reader(io.StringIO(whole, newline="")))[1:]
        kept = [row for row in rows if int(row[0]) < step or (int(row[0]) == step and row[1] not in names)]
        if not whole or len(whole) < len(text) or len(kept) < len(rows):
            with atomic_replace(self._path) as temp, temp.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("step", "name", "value"), *kept])


class MLflow:
    """`watchers: [mlflow]`: a run of MLflow, in the run's directory unless `tracking_uri` names a place. A resumed run
    goes on in the same one."""

    alone = True

    def __init__(self, directory: str, tracking_uri: str = "", experiment: str = "shoal") -> None:
        self._library = _library("mlflow", "mlflow")
        self._uri = tracking_uri or Path(directory).resolve().as_uri()
        self._note = Path(directory) / "run_id.txt"
        self._experiment = experiment
        self._client: Any = None
        self._run_id: str | None = None
        self._logged: dict[str, int] = {}  # the last step that an earlier process logged, by name

    def watch(self, event: Event) -> str | None:
        if found := scalars_of(event):
            client = self._connected()
            for name, value in found.items():
                if (event.step or 0) > self._last_logged(name):
                    client.log_metric(self._run_id, name, value, step=event.step)
        elif event.kind == "finished" and self._run_id:
            self._connected().set_terminated(self._run_id)
        return None

    def _connected(self) -> Any:
        if self._client is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a directory is the store that needs no database
            self._client = self._library.MlflowClient(tracking_uri=self._uri)
        if self._run_id is None:
            known = self._client.get_experiment_by_name(self._experiment)
            number = known.experiment_id if known else self._client.create_experiment(self._experiment)
            if self._note.is_file():  # of a worker that wrote before this one, and is gone
                self._run_id = self._note.read_text(encoding="utf-8")
            else:
                self._run_id = str(self._client.create_run(number).info.run_id)
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.write_text(self._run_id, encoding="utf-8")
        return self._client

    def _last_logged(self, name: str) -> int:
        """A resumed run computes some steps again, to the same values."""
        if name not in self._logged:
            history = self._client.get_metric_history(self._run_id, name)
            self._logged[name] = max((point.step for point in history), default=-1)
        return self._logged[name]

    def state(self) -> dict[str, Any]:
        return {"run_id": self._run_id}

    def load_state(self, state: dict[str, Any]) -> None:
        self._run_id = state["run_id"]


class WeightsAndBiases:
    """`watchers: [wandb]`: a run of Weights & Biases in the run's directory, offline unless `mode: online`. `wandb
    sync` sends it later."""

    alone = True

    def __init__(self, directory: str, project: str = "shoal", mode: str = "offline") -> None:
        self._library = _library("wandb", "wandb")
        self._options = {"dir": directory, "project": project, "mode": mode}
        self._run: Any = None

    def watch(self, event: Event) -> str | None:
        if found := scalars_of(event):
            if self._run is None:
                Path(self._options["dir"]).mkdir(parents=True, exist_ok=True)
                self._run = self._library.init(**self._options)
            self._run.log(found | {"step": event.step})
        elif event.kind in ("finished", "left") and self._run is not None:
            self._run.finish()
            self._run = None
        return None


class LearningRateFinder:
    """`watchers: [{name: lr_finder, args: {low: 1.0e-6, high: 1.0, steps: 100}}]`: raises the learning rate at every
    step, and stops. The reason to stop names the rate at which the smoothed loss fell fastest.

    The rate is a function of the step, so every worker uses the same one.
    """

    SMOOTHING = 0.9
    MARGIN = 4.0
    """The search ends when the smoothed loss is so many times the best."""

    def __init__(self, directory: str, low: float = 1e-6, high: float = 1.0, steps: int = 100) -> None:
        if not 0 < low < high or steps < 3:
            raise error("SH106", "lr_finder needs 0 < low < high, and at least 3 steps", where="watchers")
        self._path = Path(directory) / "lr_finder.csv"
        self._low, self._high, self._steps = low, high, steps
        self._worker: AttachedWorker | None = None
        self.points: list[tuple[float, float]] = []

    def attach(self, worker: AttachedWorker) -> None:
        _check_steps("lr_finder", self._steps, worker, fix=f"Write args: {{steps: {worker.steps}}}, or train longer.")
        self._worker = worker

    def rate(self, step: int) -> float:
        return float(self._low * (self._high / self._low) ** (step / (self._steps - 1)))

    def watch(self, event: Event) -> str | None:
        if event.kind == "before_step" and self._worker is not None:
            for group in [group for one in self._worker.optimizers for group in one.param_groups]:
                group["lr"] = self.rate(event.step or 0)
        if event.kind == "finished" and not self._path.exists():  # something else has ended the run
            self._write()
        if event.kind != "step":
            return None
        self.points.append((self.rate((event.step or 1) - 1), float(event["loss"])))
        if len(self.points) < self._steps and not self._diverged(self.smoothed()):
            return None
        self._write()
        return f"lr_finder: the loss falls fastest at a learning rate of {self.suggestion():.2g}"

    def _write(self) -> None:
        smooth = self.smoothed()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [("lr", "loss", "smoothed"), *((*p, s) for p, s in zip(self.points, smooth, strict=True))]
            )

    def smoothed(self) -> list[float]:
        """An exponential average without bias towards the first values."""
        found, average = [], 0.0
        for number, (_, loss) in enumerate(self.points, start=1):
            average = self.SMOOTHING * average + (1 - self.SMOOTHING) * loss
            found.append(average / (1 - self.SMOOTHING**number))
        return found

    def suggestion(self) -> float:
        """The rate of the steepest descent of the smoothed loss over the logarithm of the rate."""
        smooth = self.smoothed()
        slopes = [
            (after - before, rate) for before, after, (rate, _) in zip(smooth, smooth[1:], self.points, strict=False)
        ]
        return min((slope for slope in slopes if math.isfinite(slope[0])), default=(0.0, self._low))[1]

    def _diverged(self, smooth: list[float]) -> bool:
        return not math.isfinite(smooth[-1]) or smooth[-1] > self.MARGIN * min(smooth)

    def state(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.points = [(float(rate), float(loss)) for rate, loss in state["points"]]


class TorchProfiler:
    """`watchers: [{name: profiler, args: {first: 10, steps: 3}}]`: a trace of these steps of each worker, as
    trace-worker-0.json, which Perfetto and chrome://tracing show."""

    def __init__(self, directory: str, first: int = 10, steps: int = 3, memory: bool = False) -> None:
        self._directory = Path(directory)
        self._first, self._steps, self._memory = first, steps, memory
        self._profiler: Any = None

    def attach(self, worker: AttachedWorker) -> None:
        """The events before steps are for attached watchers."""
        fix = f"Write args: {{first: {max(worker.steps - self._steps, 0)}}}, or train longer."
        _check_steps("profiler", self._first + 1, worker, fix=fix)

    def watch(self, event: Event) -> str | None:
        if event.kind == "before_step" and event.step == self._first and self._profiler is None:
            from torch.profiler import profile

            self._profiler = profile(record_shapes=True, profile_memory=self._memory)
            self._profiler.start()
        elif self._profiler is not None and (
            event.kind in ("finished", "left")
            or (event.kind == "step" and (event.step or 0) >= self._first + self._steps)
        ):
            self._profiler.stop()
            self._directory.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._directory / f"trace-{event.who}.json"))
            self._profiler = None
        return None
