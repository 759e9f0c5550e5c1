"""The ladder: cheap rungs first, each judged on the file that it wrote, kept only if it pays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

from shoal.errors import ShoalError, single_errors
from shoal.jobs.compression.workshop import Candidate, Show, Workshop
from shoal.jobs.probes import ProbeBugError
from shoal.plan.compression import RUNTIME, judge_rung, kept_shares, meets_targets, packed_share, undecidable
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import Certificate, Quality, RungReport
from shoal.spec.compression.steps import (
    FoldStep,
    MaskStep,
    OnnxStep,
    PackStep,
    RoundStep,
    ShareStep,
    TuneStep,
    ZeroStep,
)

PRUNED_SHARES = (0.25, 0.5, 0.75)
CANNOT_CONTINUE = ("SH409", "SH603", "SH665")
"""What no other rung would do better. A smaller model on which the user's code fails is the rung's own: the parent was
judged before all rungs."""


class Ladder:
    """One compression. `base` is the best model with float weights so far, from which the next rungs start; `chosen`
    is the best file."""

    def __init__(self, workshop: Workshop, config: CompressConfig, *, show: Show) -> None:
        self.workshop, self.config, self._show = workshop, config, show
        self.rungs: list[RungReport] = []
        self.notes: list[str] = []
        assert workshop.parent is not None
        self.parent = workshop.parent
        self.base = self._start = self.chosen = self.parent
        self._onnx_parent: Candidate | None = None
        self.now = self._add(RungReport(name="parent", artefact=self.parent.artefact, size_ratio=1.0, kept=True))
        self._base_row = self.now

    @property
    def done(self) -> bool:
        """Whether there is a target, and it is met."""
        return self.config.target.is_set and meets_targets(self.now, self.config.target)

    def climb(self) -> None:
        """Try the rungs in order until the targets are met."""
        quality = self._judge(self.parent)
        facts = {"quality": quality, "parameters": self.parent.parameters}
        self.rungs[0] = self.now = self._base_row = self.now.model_copy(update=facts)
        if quality is None:
            self.notes.append("the job has no validation part: the quality is not measured, and only a proof counts")
        elif undecidable(quality, self.config.max_drop):
            self.notes.append(
                f"the validation part has {quality.samples} samples: it cannot show a drop of "
                f"{self.config.max_drop:.2%} or less, so only proven rungs can be kept"
            )
        for step in self.workshop.first_steps:
            self.base = self._start = self.workshop.take(self.base, step)
        if set(self.config.rungs) - {"lossless", "unused"}:
            self._attempt(RUNTIME, self._runtime)
        acts: dict[str, Callable[[], object]] = {
            "lossless": lambda: self._lossless("proven"),
            "unused": lambda: self._lossless("data"),
            "int8": lambda: self._int8(self.base),
            "prune": self._prune,
            "low_bits": self._low_bits,
            "pack": self._pack,
            "low_rank": self._low_rank,
        }
        for rung in self.config.rungs:
            if not self.done:
                self._attempt(rung, acts[rung])

    # ---- rungs ----

    def _runtime(self) -> None:
        """The parent in another runtime: never chosen, because nothing is compressed."""
        self._onnx_parent = replace(self.workshop.take(self.parent, OnnxStep(bits=32)), name=RUNTIME)
        row = self._measure(self._onnx_parent, against=self.parent)
        self._add(row.model_copy(update={"why": "reported apart: the same model in another runtime"}))

    def _lossless(self, claim: str) -> None:
        name = "lossless" if claim == "proven" else "equal on the training samples"
        made, facts = self.workshop.propose(self.base, "lossless", name, claim=claim, box=self.config.box)
        if made is self.base:
            self._add(RungReport(name=name, refused=facts.refused, why="nothing can be removed"))
        else:
            self._consider_base(made, certificate=facts.certificate, refused=facts.refused)

    def _int8(self, start: Candidate) -> bool:
        """8 bits after training; if that costs too much, with training through the rounding."""
        made = replace(self.workshop.take(start, OnnxStep(bits=8)), name=_joined(start, "int8"))
        if self._consider(made):
            return True
        quality = self.rungs[-1].quality
        if quality is None or quality.drop_bound <= self.config.max_drop or undecidable(quality, self.config.max_drop):
            return False
        hold = RoundStep(layers=dict.fromkeys(self.workshop.layers(start, packed=False), 8))
        tuned = self.workshop.tune(start, self._tuning(hold=hold))
        made = replace(self.workshop.take(tuned, OnnxStep(bits=8)), name=_joined(start, "int8 with training"))
        return self._consider(made)

    def _prune(self) -> None:
        """More and more channels, until quality or gain is lost; then one step back, to the middle."""
        start, less = self._with_norms(), 0.0
        for share in PRUNED_SHARES:
            if self._pruned(start, share) is False:
                self._pruned(start, (less + share) / 2)
                return
            if self.done:
                return
            less = share

    def _pruned(self, start: Candidate, share: float) -> bool | None:
        """Whether the pruned model is kept; None if it was not trained, because it cannot meet the target."""
        name = f"prune {share:.0%}"
        cut, facts = self.workshop.prune(start, name, remove=share, importance=self.config.importance)
        if share < PRUNED_SHARES[-1] and self._too_large(cut):
            self._add(RungReport(name=name, parameters=cut.parameters, why="too large for the target even with int8"))
            return None
        best = self._folded(self._best_tuning(cut))
        if not self._consider_base(best, refused=facts.refused):
            return False
        if "int8" in self.config.rungs and not self.done:
            self._attempt(_joined(best, "int8"), lambda: self._int8(best))
        return True

    def _too_large(self, cut: Candidate) -> bool:
        """Whether 8 bits for each of its parameters would be more than the target allows, as 8 bits for those of the
        whole model were measured to take. Its training is saved."""
        target = self.config.target.size
        bits8 = next((one for one in self.rungs if one.name.endswith("int8") and one.size_ratio), None)
        if target is None or bits8 is None or bits8.size_ratio is None:
            return False
        return bits8.size_ratio * cut.parameters / bits8.parameters > target

    def _with_norms(self) -> Candidate:
        """What pruning starts from: batch norms are folded after the tuning, because training needs them."""
        return self._start if any(isinstance(step, FoldStep) for step in self.base.steps) else self.base

    def _folded(self, made: Candidate) -> Candidate:
        """The candidate with its batch norms folded; as it is if it has none, or cannot be traced."""
        with contextlib.suppress(ShoalError):
            return self.workshop.propose(made, "fold", made.name)[0]
        return made

    def _best_tuning(self, cut: Candidate) -> Candidate:
        """Tuning with and without a teacher, and the same shape from scratch with the same budget: the best of them in
        validation. The others are reported."""
        ways = {"tuned": self._tuning()}
        if self._may_teach:
            ways["with teacher"] = self._tuning(teacher=True)
        if self.config.tune.scratch:
            ways["from scratch"] = self._tuning(scratch=True)
        made = [replace(self.workshop.tune(cut, step), name=f"{cut.name}, {way}") for way, step in ways.items()]
        found = self.workshop.judge_all(made)
        best = min(range(len(made)), key=lambda i: (found[i].drop, i))
        for i, one in enumerate(made):
            if i != best:
                row = RungReport(name=one.name, steps=list(one.steps), artefact=one.artefact, parameters=one.parameters)
                better = made[best].name.rpartition(", ")[2]
                why = f"{better} is better" if found[i].drop > found[best].drop else f"{better} is as good"
                self._add(row.model_copy(update={"quality": found[i], "size_ratio": self._share(one), "why": why}))
        return made[best]

    def _low_bits(self) -> None:
        """Weights of 4, 3 and 2 bits, each trained through the rounding from the one before it."""
        if self._only_smaller("low_bits"):
            return
        layers, current = list(self.workshop.layers(self.base, packed=True)), self.base
        for bits in (4, 3, 2):
            hold = RoundStep(layers=dict.fromkeys(layers, bits))
            current = self.workshop.tune(current, self._tuning(hold=hold, teacher=self._may_teach))
            made = self.workshop.take(current, PackStep(bits=bits, rounded=layers))
            if not self._consider(replace(made, name=_joined(self.base, f"{bits} bits"))) or self.done:
                return

    def _only_smaller(self, rung: str) -> bool:
        """Whether a latency is asked for: a packed file runs as before, so that the rung is left out."""
        if self.config.target.latency is None:
            return False
        self._add(RungReport(name=rung, why="it makes nothing faster, and a latency is asked for"))
        return True

    def _pack(self) -> None:
        """Fewer and fewer weights, then shared values. Only size counts here: the file runs as before."""
        if self._only_smaller("pack"):
            return
        sizes = self.workshop.layers(self.base, packed=True)
        good = self._sparse()
        for bits in (4, 3):
            hold = ShareStep(layers=dict.fromkeys(sizes, bits))
            tuned = self.workshop.tune(good, self._tuning(hold=hold, teacher=self._may_teach))
            made = replace(self.workshop.take(tuned, PackStep(bits=bits)), name=f"{good.name} + {bits} bits, packed")
            if not self._consider(made) or self.done:
                return

    def _sparse(self) -> Candidate:
        """The model with as few weights as the size asks for and the quality allows; at a share that is too small, one
        step back, to the middle between it and the last good one."""
        good, less = self.base, 1.0
        shares = kept_shares(self.config.target.size)
        for number, first in enumerate(shares):
            last = number == len(shares) - 1
            share = min(self._last_share(good, less, first), less) if last else first
            current = self._sparser(good, share)
            if current is None:
                return self._sparser(good, math.sqrt(less * share)) or good
            good, less = current, share
        return good

    def _last_share(self, good: Candidate, share: float, foreseen: float) -> float:
        """What a file of the size that is asked for holds, by the size of a file with the share that there is now."""
        size = self.config.target.size
        if size is None or share == 1:
            return foreseen
        ratio = self._share(self.workshop.take(good, PackStep(bits=4))) / packed_share(share, bits=4)
        return kept_shares(size / ratio)[-1]

    def _sparser(self, start: Candidate, share: float) -> Candidate | None:
        """The candidate with this share of its weights, tuned; None if its drop may be too large."""
        step = ZeroStep(keep=self.workshop.kept_by_layer(start, share))
        zeroed = self.workshop.take(start, step)
        tuning = self._tuning(hold=MaskStep(layers=list(step.keep)), teacher=self._may_teach)
        made = replace(self.workshop.tune(zeroed, tuning), name=_joined(self.base, f"{share:.1%} of the weights"))
        quality = self.workshop.judge(made)
        if quality.drop_bound <= self.config.max_drop:
            return made
        why = f"the drop may be {quality.drop_bound:.2%}: more weights are kept"
        self._add(RungReport(name=made.name, quality=quality, artefact=made.artefact, why=why))
        return None

    @property
    def _may_teach(self) -> bool:
        """The parent can teach unless its shape is not the one that the user's code builds."""
        return self.config.tune.teacher and self.workshop.job.shape is None

    def _low_rank(self) -> None:
        """Half and a quarter of the ranks, both of the layers that there are now: a product of products is another
        thing."""
        start = self.base
        for share in (0.5, 0.25):
            cut, facts = self.workshop.propose(start, "low_rank", f"low rank {share:.0%}", share=share)
            made = replace(self.workshop.tune(cut, self._tuning()), name=f"low rank {share:.0%}, tuned")
            if not self._consider_base(made, refused=facts.refused) or self.done:
                return

    # ---- measuring and deciding ----

    def _tuning(self, **how: object) -> TuneStep:
        tune = self.config.tune
        return TuneStep.model_validate({"epochs": tune.epochs, "lr": tune.lr, **how})

    def _consider(self, made: Candidate) -> bool:
        """Measure a file, report it, and choose it if it pays."""
        row = self._measure(made)
        kept, why = judge_rung(row, now=self.now, config=self.config)
        row = self._add(row.model_copy(update={"kept": kept, "why": why}))
        if kept:
            self.chosen, self.now = made, row
        return kept

    def _consider_base(
        self, made: Candidate, *, certificate: Certificate | None = None, refused: dict[str, str] | None = None
    ) -> bool:
        """The same for float weights: if they pay against those that there are, the next rungs start from them, even if
        a file in another form is still smaller."""
        facts = {"certificate": certificate, "refused": refused or {}}
        row = self._measure(made).model_copy(update=facts)
        kept, why = judge_rung(row, now=self._base_row, config=self.config)
        is_best, why_best = judge_rung(row, now=self.now, config=self.config)
        if kept:
            why = why_best if is_best else f"{why} than '{self._base_row.name}'; '{self.now.name}' stays the best file"
        row = self._add(row.model_copy(update={"kept": kept, "why": why}))
        if not kept:
            return False
        self.base, self._base_row = made, row
        if is_best:
            self.chosen, self.now = made, row
        return True

    def _measure(self, made: Candidate, *, against: Candidate | None = None) -> RungReport:
        """Size, quality and latency of the file; latency against the parent in the same runtime."""
        is_onnx = made.artefact.path.endswith(".onnx")
        base = against or (self._onnx_parent if is_onnx and self._onnx_parent else self.parent)
        row = RungReport(
            name=made.name,
            steps=list(made.steps),
            artefact=made.artefact,
            size_ratio=self._share(made),
            parameters=made.parameters,
            quality=self._judge(made),
        )
        if made.artefact.path.endswith(".packed"):
            return row
        models = {"base": base, "eager": self.parent, "made": made}
        times = {one.name: one for one in self.workshop.time(models)}
        latency = times["made"].model_copy(update={"name": base.name})
        eager = {size: ratio.median for size, ratio in latency.eager.items()}
        return row.model_copy(update={"latency": latency, "eager_ratio": eager})

    def _judge(self, made: Candidate) -> Quality | None:
        """None if only proofs are asked for, and there is nothing to judge on. SH665 if other rungs are."""
        if set(self.config.rungs) == {"lossless"} and "validation" not in self.workshop.held_out:
            return None
        return self.workshop.judge(made)

    def _share(self, made: Candidate) -> float:
        return made.artefact.size_bytes / self.parent.artefact.size_bytes

    def _add(self, row: RungReport) -> RungReport:
        self.rungs.append(row)
        said = "kept" if row.kept else "not kept"
        self._show(f"{row.name}: {said}{f' ({row.why})' if row.why else ''}")
        return row

    def _attempt(self, name: str, act: Callable[[], object]) -> None:
        """A rung that the model or its libraries do not allow, or that ends in a bug, is reported; the ladder goes
        on."""
        try:
            act()
        except ProbeBugError as failure:
            self._add(RungReport(name=name, why=f"a bug: {failure.what}"))
        except ShoalError as failure:
            errors = single_errors(failure)
            if any(one.code in CANNOT_CONTINUE for one in errors):
                raise
            self._add(RungReport(name=name, why="; ".join(f"{one.code}: {one.message}" for one in errors)))


def _joined(start: Candidate, what: str) -> str:
    return what if start.name == "parent" else f"{start.name} + {what}"
