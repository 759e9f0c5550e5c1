"""Takes the steps of a recipe, each in a process of its own or as an ordinary run. The parent is only read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import RunError, ShoalError, error
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.compression.answers import AnswerLog, question_key
from shoal.jobs.compression.errands import Errands, OwnErrands, StoppedError
from shoal.jobs.coroutines import Steps, all_steps
from shoal.jobs.probes import probe_steps
from shoal.plan.compression import divide_lanes, join_ranges, tune_job
from shoal.spec.base import Spec
from shoal.spec.compression.answers import (
    AnsweredParts,
    ExportFacts,
    JudgedModels,
    LayerShares,
    LayerSizes,
    RangesPart,
    ScoresPart,
    TimedModels,
)
from shoal.spec.compression.measured import Artefact, Latency, ModelFile, Quality, ShapedModel
from shoal.spec.compression.steps import (
    CutStep,
    DenseStep,
    FoldStep,
    LowRankStep,
    OnnxStep,
    PackStep,
    ShapeStep,
    Step,
    TuneStep,
    ZeroStep,
)
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

BATCH_SIZES = (1, 64)
RESTARTS = 3
Show = Callable[[str], object]
T = TypeVar("T")
A = TypeVar("A", bound=Spec)


@dataclass(frozen=True)
class Candidate:
    """A model on its way down. `weights` is always a safetensors file; `artefact` is the file that is judged."""

    name: str
    weights: Artefact
    artefact: Artefact
    shape: tuple[ShapeStep, ...] = ()
    steps: tuple[Step, ...] = ()
    parameters: int = 0

    @property
    def source(self) -> ModelFile:
        return ModelFile(path=self.weights.path, shape=list(self.shape))

    @property
    def file(self) -> ModelFile:
        return ModelFile(path=self.artefact.path, shape=list(self.shape))


class Workshop:
    """`folder` gets the files of every attempt. One fork server starts all processes. What an earlier workshop of this
    folder found out is not done again."""

    def __init__(self, job: Job, folder: Path, *, fork_server: ForkServer, errands: Errands | None = None) -> None:
        self.job, self.folder = job, folder
        self._fork_server = fork_server
        self._errands = errands or OwnErrands(fork_server)
        self._answers = AnswerLog(folder / "answers.jsonl")
        self._attempts = 0
        self.parent: Candidate | None = None
        self.first_steps: list[DenseStep] = []
        self.on_answer: Callable[[], object] = lambda: None

    def open_parent(self, weights: str) -> Candidate:
        shape = self.job.shape.steps if self.job.shape else []
        made = self._shaped(
            "describe", file=ModelFile(path=weights, shape=list(shape)), out=self.new_path("safetensors")
        )
        file = _weights_of(made)
        self.first_steps = [step for step in made.steps if isinstance(step, DenseStep)]
        self.parent = Candidate("parent", file, file, tuple(shape), (), made.parameters)
        return self.parent

    def new_path(self, ending: str) -> str:
        """A new directory for one attempt, and a file in it."""
        self._attempts += 1
        directory = self.folder / f"{self._attempts:03d}"
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory / f"model.{ending}")

    # ---- steps ----

    def take(self, candidate: Candidate, step: Step) -> Candidate:
        """The candidate after a known step."""
        if isinstance(step, DenseStep | FoldStep | CutStep | LowRankStep):
            made = self._shaped("apply", file=candidate.source, steps=_plain([step]), out=self.new_path("safetensors"))
            return self.reshaped(candidate, candidate.name, made)
        if isinstance(step, ZeroStep):
            made = self._shaped("zero", file=candidate.source, keep=step.keep, out=self.new_path("safetensors"))
            return self._weighted(candidate, made, step)
        if isinstance(step, TuneStep):
            return self.tune(candidate, step)
        if isinstance(step, OnnxStep):
            artefact = self._onnx(candidate, step)
        else:
            assert isinstance(step, PackStep)
            how = {"bits": step.bits, "rounded": step.rounded}
            artefact = self._ask(Artefact, "pack", file=candidate.source, out=self.new_path("packed"), **how)
        return replace(candidate, artefact=artefact, steps=(*candidate.steps, step))

    def _onnx(self, candidate: Candidate, step: OnnxStep) -> Artefact:
        """Workers observe the ranges, each on its lanes."""
        out = self.new_path("onnx")
        if step.bits == 32:
            return self._ask(Artefact, "onnx", file=candidate.source, out=out)
        plain = f"{out}.float.onnx"
        self._ask(Artefact, "onnx", file=candidate.source, out=plain)
        asked = [{"path": plain, "samples": step.samples} for _ in self._lanes]
        joined = join_ranges([one.ranges for one in self._ask_workers(RangesPart, "ranges", asked)])
        return self._ask(Artefact, "int8", file=candidate.source, path=plain, out=out, ranges=joined)

    def prune(
        self, candidate: Candidate, name: str, *, remove: float, importance: str
    ) -> tuple[Candidate, ShapedModel]:
        """The candidate without the channels that matter least. Workers measure importance, each on its lanes."""
        asked = {"file": candidate.source, "importance": importance}
        parts: list[ScoresPart] = []
        if importance != "magnitude":
            questions = [{**asked, "out": self.new_path("scores")} for _ in self._lanes]
            parts = self._ask_workers(ScoresPart, "scores", questions)
        return self.propose(
            candidate, "prune", name, remove=remove, importance=importance, parts=[one.model_dump() for one in parts]
        )

    @property
    def _lanes(self) -> list[list[int]]:
        """The lanes of each worker."""
        return divide_lanes(self.job.lane_count, self.job.workers.least)

    def propose(self, candidate: Candidate, action: str, name: str, **arguments: Any) -> tuple[Candidate, ShapedModel]:
        """What an action finds out about the candidate: new steps, and the candidate after them."""
        out = self.new_path("safetensors")
        made = self._shaped(action, file=candidate.source, out=out, **arguments)
        return self.reshaped(candidate, name, made), made

    def reshaped(self, candidate: Candidate, name: str, made: ShapedModel) -> Candidate:
        if made.weights is None:
            return candidate
        return Candidate(
            name,
            made.weights,
            made.weights,
            (*candidate.shape, *made.steps),
            (*candidate.steps, *made.steps),  # type: ignore[arg-type]
            made.parameters,
        )

    def _weighted(self, candidate: Candidate, made: ShapedModel, step: Step) -> Candidate:
        weights = _weights_of(made)
        return replace(
            candidate,
            weights=weights,
            artefact=weights,
            steps=(*candidate.steps, step),
            parameters=made.parameters,
        )

    def tune(self, candidate: Candidate, step: TuneStep) -> Candidate:
        """Train the shape as an ordinary run in this folder. Raises the error of a run that fails, and StoppedError if
        it is stopped. Its directory is named by what is trained, so that whoever trains the same resumes it."""
        assert self.parent is not None
        start = None if step.scratch else self._held(candidate, step)
        teacher = self.parent.weights.path if step.teacher else None
        weights = start.path if start else None
        job = tune_job(self.job, step, shape=candidate.shape, weights=weights, teacher=teacher)
        trained_by = question_key(job.sha256(), start.sha256 if start else "")
        result = self._errands.train(job, RunPaths.at(self.folder / "runs" / f"tune-{trained_by[:16]}"))
        if result.error is not None:
            raise result.error
        if result.status != "finished":
            raise StoppedError(result.status)
        shape = [*candidate.shape, *([step.hold] if step.hold else [])]
        trained = ModelFile(path=str(result.paths.model / "model.safetensors"), shape=list(shape))
        held = list(step.hold.layers) if step.hold else []
        made = self._shaped("plain", file=trained, held=held, out=self.new_path("safetensors"))
        return self._weighted(candidate, made, step)

    def _held(self, candidate: Candidate, step: TuneStep) -> Artefact:
        """The file that the training starts from: with the masks or codes of these weights, if they are held."""
        if step.hold is None:
            return candidate.weights
        made = self._shaped("apply", file=candidate.source, steps=_plain([step.hold]), out=self.new_path("safetensors"))
        return _weights_of(made)

    # ---- measurements ----

    @property
    def held_out(self) -> list[str]:
        """The parts of the data that nothing is trained on."""
        data, names = self.job.data, ("validation", "test")
        return [name for name in names if getattr(data, name) is not None or getattr(data.split, name, None)]

    def judge(self, candidate: Candidate, *, part: str = "validation") -> Quality:
        return self.judge_all([candidate], part=part)[0]

    def judge_all(self, candidates: Sequence[Candidate], *, part: str = "validation") -> list[Quality]:
        """Each file, loaded back from disk, against the parent."""
        assert self.parent is not None
        files = {str(i): one.file.model_dump(mode="json") for i, one in enumerate(candidates)}
        known = str(self.folder / f"parent-{part}.json")
        asked = {"parent": self.parent.file, "models": files, "part": part, "known": known}
        return self._ask(JudgedModels, "quality", _names_are(files), **asked).found

    def time(self, models: Mapping[str, Candidate], sizes: Sequence[int] = BATCH_SIZES) -> list[Latency]:
        files = {name: one.file.model_dump(mode="json") for name, one in models.items()}
        named = _names_are(files)

        def is_sound(timed: TimedModels) -> bool:
            return named(timed) and len({tuple(one.seconds) for one in timed.found}) == 1

        return self._ask(TimedModels, "latency", is_sound, models=files, sizes=list(sizes)).found

    def layers(self, candidate: Candidate, *, packed: bool) -> dict[str, int]:
        """With their numbers of weights, for a packed file or not."""
        return self._ask(LayerSizes, "layers", file=candidate.source, packed=packed).weights

    def kept_by_layer(self, candidate: Candidate, share: float) -> dict[str, float]:
        """The share of the weights that each layer keeps, if the model keeps this share of them."""
        return self._ask(LayerShares, "kept_by_layer", file=candidate.source, share=share).keep

    def export(self, candidate: Candidate, **arguments: Any) -> ExportFacts:
        return self._ask(ExportFacts, "export", file=candidate.source, **arguments)

    def _shaped(self, action: str, **arguments: Any) -> ShapedModel:
        return self._ask(ShapedModel, action, **arguments)

    def _ask_workers(self, kind: type[A], action: str, arguments: Sequence[Mapping[str, Any]]) -> list[A]:
        """The answers of one process for each part of the lanes, which run at the same time. A part is a pure function
        of its lanes: a process that is killed is started again."""
        asked = [{**_plain_arguments(one), "lanes": lanes} for one, lanes in zip(arguments, self._lanes, strict=True)]

        def parts() -> Mapping[str, Any]:
            found = self._errands.ask(all_steps([self._until_answered(action, one) for one in asked]))
            return {"parts": [dict(one) for one in found]}

        def read(answer: Mapping[str, Any]) -> list[A]:
            found = [kind.model_validate(one) for one in AnsweredParts.model_validate(answer).parts]
            if len(found) != len(asked):
                raise ValueError("a worker has not answered")
            return found

        return self._once(action, asked, parts, read)

    def _until_answered(self, action: str, arguments: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        for _ in range(RESTARTS):
            try:
                return (yield from self._asking(action, arguments))
            except RunError as failure:
                if failure.code != "SH603":
                    raise
        return (yield from self._asking(action, arguments))

    def _asking(self, action: str, arguments: Mapping[str, Any]) -> Steps[Mapping[str, Any]]:
        found = yield from probe_steps("compress", self.job, self._fork_server, action=action, arguments=arguments)
        if not isinstance(found, Mapping):
            raise error("SH603", f"the process gave no answer to '{action}'")
        return found

    def _ask(self, kind: type[A], action: str, is_sound: Callable[[A], bool] = bool, /, **arguments: Any) -> A:
        """The answer of one process. One that is not sound cannot be read."""
        plain = _plain_arguments(arguments)

        def read(answer: Mapping[str, Any]) -> A:
            found = kind.model_validate(answer)
            if not is_sound(found):
                raise ValueError("it answers another question")
            return found

        return self._once(action, plain, lambda: self._errands.ask(self._asking(action, plain)), read)

    def _once(
        self, action: str, asked: Any, answer: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], T]
    ) -> T:
        """The answer that is known, or the one that is given now and kept. A known one that cannot be read is given
        again; SH603 if the process gives such a one."""
        key = question_key(action, asked)
        known = self._answers.take(key)
        with contextlib.suppress(ValueError):
            if known is not None:
                return read(known)
        given = answer()
        try:
            found = read(given)
            self._answers.add(key, given)
        except ValueError as failure:  # also for letters that cannot be written down
            raise _wrong_answer(action) from failure
        self.on_answer()
        return found


def _names_are(files: Mapping[str, Any]) -> Callable[[JudgedModels | TimedModels], bool]:
    return lambda answer: [one.name for one in answer.found] == list(files)


def _weights_of(made: ShapedModel) -> Artefact:
    if made.weights is None:
        raise _wrong_answer("weights")
    return made.weights


def _wrong_answer(action: str) -> ShoalError:
    return error("SH603", f"the process gave no answer to '{action}' that can be read")


def _plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.model_dump(mode="json") if isinstance(v, ModelFile) else v for k, v in arguments.items()}


def _plain(steps: Sequence[Any]) -> list[Any]:
    return [step.model_dump(mode="json") for step in steps]
