"""What the ladder decides, from sizes, drops and times that a workshop reports. Real workshops: test_ladder_long.py."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from shoal.errors import ShoalError, error
from shoal.jobs.compression.ladder import Ladder
from shoal.jobs.compression.result import plot_svg
from shoal.jobs.compression.workshop import Candidate
from shoal.jobs.probes import _result
from shoal.plan.compression import RUNTIME, best_rungs
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import (
    Artefact,
    Certificate,
    CompressionReport,
    Latency,
    Quality,
    Ratio,
    RungReport,
    ShapedModel,
)
from shoal.spec.compression.steps import CutStep, Kept, OnnxStep, PackStep, ZeroStep

SPREAD = 0.02
SMALLEST = 0.0003


def artefact(ending, size):
    return Artefact(path=f"model.{ending}", size_bytes=int(size), sha256="0" * 64)


class Scripted:
    """A workshop whose models have a thousand parameters. `drop` and `ratio` are functions of a candidate."""

    def __init__(self, drop=lambda made: 0.0, ratio=lambda made: 0.5, smallest=SMALLEST):
        self.job, self.first_steps, self.held_out = SimpleNamespace(shape=None), [], ["validation"]
        whole = artefact("safetensors", 4000)
        self.parent = Candidate("parent", whole, whole, parameters=1000)
        self.drop, self.ratio, self.smallest, self.tuned, self.asked = drop, ratio, smallest, [], []

    def take(self, made, step):
        if isinstance(step, OnnxStep):
            file = artefact("onnx", made.parameters * step.bits / 8 + 10)
        elif isinstance(step, PackStep):
            file = artefact("packed", made.parameters * step.bits / 8)
        else:
            file = made.artefact
        return replace(made, artefact=file, steps=(*made.steps, step))

    def prune(self, made, name, *, remove, importance):
        self.asked.append(("prune", importance))
        left = round(made.parameters * (1 - remove))
        step = CutStep(layers={"0": Kept(out=f"0-{left - 1}")})
        file = artefact("safetensors", 4 * left)
        return Candidate(name, file, file, (step,), (*made.steps, step), left), ShapedModel()

    def propose(self, made, action, name, **how):
        self.asked.append((action, made.name, how))
        return made, ShapedModel(refused={"0": "it is needed"})

    def tune(self, made, step):
        self.tuned.append((made.name, step))
        return replace(made, steps=(*made.steps, step))

    def judge(self, made):
        return self.judge_all([made])[0]

    def judge_all(self, several):
        facts = {"part": "validation", "metric": "accuracy", "samples": 10_000, "parent": 0.9, "changed": 0}
        drops = [0.0 if one is self.parent else self.drop(one) for one in several]
        bounds = {"smallest_bound": self.smallest}
        return [Quality(**facts, value=0.9 - d, drop=d, drop_bound=d + self.smallest, **bounds) for d in drops]

    def time(self, models):
        ratios = {"base": 1.0, "eager": 1.0, "made": self.ratio(models["made"])}
        made = {name: Ratio(median=r, low=r - SPREAD / 2, high=r + SPREAD / 2) for name, r in ratios.items()}
        return [
            Latency(name=n, seconds={1: r.median}, ratios={1: r, 64: r}, eager={1: r, 64: r}) for n, r in made.items()
        ]

    def layers(self, made, *, packed):
        return {"0": made.parameters}

    def kept_by_layer(self, made, share):
        return {"0": share}


def climb(workshop, **config):
    ladder = Ladder(workshop, CompressConfig.model_validate(config), show=lambda text: None)
    ladder.climb()
    return ladder, {row.name: row for row in ladder.rungs}


def removed(made):
    return 1 - made.parameters / 1000


def has(made, kind, **fields):
    return any(s.kind == kind and all(getattr(s, k) == v for k, v in fields.items()) for s in made.steps)


def test_too_many_channels_take_it_one_step_back():
    ladder, rows = climb(Scripted(lambda made: 0.1 * (removed(made) > 0.4)), steps=["prune"], max_drop=0.01)
    assert [name for name in rows if name.endswith(", tuned")] == [f"prune {n}%, tuned" for n in (25, 50, 38)]
    assert rows["prune 38%, tuned"].kept
    assert ladder.chosen.parameters == 625
    assert "the drop may be 10.03%, more than 1.00%" in rows["prune 50%, tuned"].why


@pytest.mark.parametrize("best", ["tuned", "with teacher", "from scratch"])
def test_the_best_training_of_a_shape_goes_on(best):
    def drop(made):
        last = made.steps[-1]
        if last.kind != "tune":
            return 0.0
        way = "from scratch" if last.scratch else "with teacher" if last.teacher else "tuned"
        return 0.0 if way == best else 0.001

    _, rows = climb(Scripted(drop), steps=["prune"], max_drop=0.01, target={"size": 0.8})
    assert [name for name, row in rows.items() if row.kept] == ["parent", f"prune 25%, {best}"]
    others = {"tuned", "with teacher", "from scratch"} - {best}
    assert {rows[f"prune 25%, {way}"].why for way in others} == {f"{best} is better"}
    budgets = {step.epochs for _, step in [*_tunings(rows)]}
    assert budgets == {2}


def _tunings(rows):
    return [(name, step) for name, row in rows.items() for step in row.steps if step.kind == "tune"]


def test_eight_bits_that_cost_too_much_are_trained_through_the_rounding():
    def drop(made):
        return 0.1 if has(made, "onnx", bits=8) and not has(made, "tune") else 0.0

    workshop = Scripted(drop)
    _, rows = climb(workshop, steps=["int8"], max_drop=0.01)
    assert not rows["int8"].kept
    assert rows["int8 with training"].kept
    assert [step.hold.layers for _, step in workshop.tuned] == [{"0": 8}]


@pytest.mark.parametrize("proven", [False, True], ids=["parent", "lossless"])
def test_a_share_that_is_too_large_for_the_target_is_not_trained(proven):
    """With 8 bits, 750 of 1,000 parameters are 19 % of the parent, and 500 are 13 %. What a proof removes first changes
    nothing about that."""
    workshop = Scripted()

    def propose(made, action, name, **how):
        facts = ShapedModel(steps=[CutStep(layers={"0": Kept(out="0-989")})])
        file = artefact("safetensors", 3900)
        return (replace(made, name=name, artefact=file) if proven and action == "lossless" else made), facts

    workshop.propose = propose
    ladder, rows = climb(workshop, steps=["lossless", "int8", "prune"], target={"size": 0.15}, max_drop=0.01)
    assert rows["prune 25%"].why == "too large for the target even with int8"
    assert {name for name, _ in workshop.tuned} == {"prune 50%"}
    assert ladder.now.name == "prune 50%, tuned + int8"
    assert has(ladder.chosen, "onnx", bits=8)


def test_eight_bits_that_are_good_are_not_trained():
    workshop = Scripted()
    climb(workshop, steps=["int8"], max_drop=0.01)
    assert workshop.tuned == []


def test_nothing_helps():
    ladder, rows = climb(Scripted(lambda made: 0.5), max_drop=0.01)
    assert ladder.chosen is ladder.parent
    assert [name for name, row in rows.items() if row.kept] == ["parent"]
    assert all(row.why for name, row in rows.items() if name != "parent")
    assert rows["lossless"].refused == {"0": "it is needed"}
    assert rows["runtime: onnx float32"].why.startswith("reported apart")


def test_the_runtime_is_never_chosen_though_it_is_faster():
    ladder, rows = climb(Scripted(ratio=lambda made: 0.1 if has(made, "onnx") else 1.0), steps=["lossless", "low_rank"])
    assert not rows["runtime: onnx float32"].kept
    assert ladder.chosen is ladder.parent


def test_a_met_target_ends_it():
    workshop = Scripted()
    ladder, rows = climb(workshop, target={"size": 0.3})
    assert (ladder.now.name, ladder.done, workshop.tuned) == ("int8", True, [])
    assert not any(name.startswith("prune") for name in rows)


def test_the_bound_decides_and_not_the_mean():
    ladder, rows = climb(Scripted(lambda made: 0.0, smallest=0.002), steps=["int8"], max_drop=0.001)
    assert rows["int8"].quality.drop == 0
    assert not rows["int8"].kept
    assert "10000 samples cannot show a drop of 0.10% or less" in rows["int8"].why
    assert any("it cannot show a drop" in note for note in ladder.notes)


def test_five_losses_decide_nothing():
    """Their mean has no bound, though none of them changed."""
    ladder, rows = climb(Scripted(smallest=math.inf), steps=["int8"])
    assert not rows["int8"].kept
    assert "so few have no bound of their mean" in rows["int8"].why
    assert any("it cannot show a drop" in note for note in ladder.notes)


def proven(workshop, **differences):
    """Half of the model goes, with a certificate of these differences."""
    measured = {"difference_float64": 0.0, "difference_points": 0.0, "largest_output": 10.0} | differences
    facts = {"low": 0.0, "high": 1.0, "samples": 5, "points": 5, "difference_float32": 0.0}
    certificate = Certificate(claim="proven", **facts, **measured)

    def propose(made, action, name, **how):
        file = artefact("safetensors", 2000)
        step = CutStep(layers={"0": Kept(out="0-499")})
        return replace(made, name=name, weights=file, artefact=file), ShapedModel(steps=[step], certificate=certificate)

    workshop.propose = propose
    return workshop


@pytest.mark.parametrize(
    "wrong",
    [
        {"difference_float64": 1e-4},
        {"difference_points": 1e-4},
        {"difference_points": math.nan},
        {"difference_float64": math.inf},
        {"largest_output": math.nan},
    ],
    ids=str,
)
def test_a_proof_that_the_measurement_contradicts_is_not_believed(wrong):
    ladder, rows = climb(proven(Scripted(), **wrong), steps=["lossless"])
    assert ladder.chosen is ladder.parent
    assert rows["lossless"].why.startswith("a proof says that it is equal, and its outputs differ by")
    ladder, rows = climb(proven(Scripted(), difference_float64=1e-9), steps=["lossless"])
    assert rows["lossless"].kept


def test_a_proof_needs_no_validation_part_and_other_rungs_do():
    workshop = proven(Scripted())
    workshop.held_out, workshop.judge = ["test"], None
    ladder, rows = climb(workshop, steps=["lossless"])
    assert (rows["lossless"].kept, rows["lossless"].quality) == (True, None)
    assert ladder.notes == ["the job has no validation part: the quality is not measured, and only a proof counts"]

    def refuse(made):
        raise error("SH665", "the job has no validation part")

    workshop.judge = refuse
    with pytest.raises(ShoalError, match="no validation part"):
        climb(workshop, steps=["lossless", "int8"])


@pytest.mark.parametrize("bound", [0.02, math.inf])
def test_all_points_are_on_the_canvas(bound):
    """Files that are larger than the parent, and drops without a bound."""
    rows = [rung("parent", 1.0, 0.0), rung("larger", 3.0, 0.01), rung("smaller", 0.1, -0.01)]
    quality = rows[1].quality.model_copy(update={"drop_bound": bound})
    rows[1] = rows[1].model_copy(update={"quality": quality})
    drawn = plot_svg(
        CompressionReport(parent="a", parent_sha256="0" * 64, rungs=rows, chosen="parent", targets_met=True)
    )
    places = [(float(x), float(y)) for x, y in re.findall(r'cx="(.+?)" cy="(.+?)"', drawn)]
    ends = [float(y) for y in re.findall(r'y2="(.+?)"', drawn)]
    assert len(places) == len(ends) == 3
    assert all(60 <= x <= 540 and 30 <= y <= 380 for x, y in places)
    assert all(20 <= y <= 380 for y in ends)
    assert places[2][0] < places[0][0] < places[1][0]


def test_importance_and_box_are_those_that_were_asked_for():
    workshop = Scripted()
    climb(workshop, steps=["lossless", "unused", "prune"], importance="zeros", box="features", max_drop=0.01)
    claims = [("lossless", "parent", {"claim": claim, "box": "features"}) for claim in ("proven", "data")]
    assert workshop.asked[:3] == [*claims, ("prune", "zeros")]


def test_products_are_of_the_layers_that_there_were():
    """A quarter of the rank is not half of the rank of both factors."""
    workshop = Scripted()

    def propose(made, action, name, *, share):
        workshop.asked.append((made.name, share))
        file = artefact("safetensors", 4000 * share)
        refused = ShapedModel(refused={"3": "another layer has the same weight"})
        return replace(made, name=name, weights=file, artefact=file), refused

    workshop.propose = propose
    ladder, rows = climb(workshop, steps=["low_rank"], max_drop=0.01)
    assert workshop.asked == [("parent", 0.5), ("parent", 0.25)]
    assert ladder.now.name == "low rank 25%, tuned"
    assert rows["low rank 50%, tuned"].refused == {"3": "another layer has the same weight"}


def test_packed_files_are_left_out_if_a_latency_is_asked_for():
    _, rows = climb(Scripted(), steps=["low_bits", "pack"], target={"latency": 0.1})
    assert rows["low_bits"].why == rows["pack"].why == "it makes nothing faster, and a latency is asked for"


def test_a_latency_that_is_lost_in_the_spread_is_no_gain():
    same = Scripted(ratio=lambda made: 0.99)
    same.take = lambda made, step: replace(made, artefact=artefact("onnx", 4000), steps=(*made.steps, step))
    _, rows = climb(same, steps=["int8"])
    assert (rows["int8"].kept, rows["int8"].why) == (False, "neither smaller nor faster")


@pytest.mark.parametrize(("small", "large", "met"), [(0.4, 0.4, True), (0.4, 0.6, False), (0.6, 0.4, False)])
def test_a_latency_must_hold_for_small_and_large_batches(small, large, met):
    workshop = Scripted()

    def time(models):
        found = {"base": (1.0, 1.0), "eager": (1.0, 1.0), "made": (small, large)}
        return [
            Latency(name=name, seconds={1: one, 64: many}, ratios=ratios, eager=ratios)
            for name, (one, many) in found.items()
            for ratios in [{1: exactly(one), 64: exactly(many)}]
        ]

    workshop.time = time
    ladder, _ = climb(workshop, steps=["int8"], target={"latency": 0.5}, max_drop=0.01)
    assert ladder.chosen.artefact.path == "model.onnx"
    assert ladder.done == met


def in_two_runtimes(models):
    """In onnxruntime the parent takes a quarter of the time, and 8 bits a fifth; a pruned model in torch takes 0.7."""
    made = models["made"].artefact.path
    base = 0.25 if models["base"].artefact.path.endswith(".onnx") else 1.0
    taken = 0.7 if not made.endswith(".onnx") else 0.2 if models["made"].steps[-1].bits == 8 else 0.25
    times = {"base": base, "eager": 1.0, "made": taken}
    return [
        Latency(name=n, seconds={1: s}, ratios={1: exactly(s / base)}, eager={1: exactly(s)}) for n, s in times.items()
    ]


def test_files_of_different_runtimes_are_compared_with_the_same_file():
    """8 bits are 0.8 of the parent in the same runtime, the pruned model 0.7 of its own: it is slower all the same."""
    workshop = Scripted(lambda made: 0.1 * (has(made, "cut") and has(made, "onnx")))
    workshop.time = in_two_runtimes
    ladder, rows = climb(workshop, steps=["int8", "prune"], max_drop=0.01)
    assert (ladder.now.name, ladder.now.eager_ratio) == ("int8", {1: 0.2})
    assert rows["int8"].latency.ratios[1].median == 0.8
    assert rows["prune 25%, tuned"].why == "smaller and faster than 'parent'; 'int8' stays the best file"
    assert rows["prune 75%, tuned"].why == "smaller than 'prune 50%, tuned'; 'int8' stays the best file"


def test_what_meets_the_targets_is_chosen_before_what_is_faster():
    """A target counts in the runtime of the file."""
    workshop = Scripted(lambda made: 0.1 * (has(made, "cut") and has(made, "onnx")))
    workshop.time = in_two_runtimes
    ladder, rows = climb(workshop, steps=["int8", "prune"], max_drop=0.01, target={"latency": 0.75})
    assert (ladder.now.name, ladder.done) == ("prune 25%, tuned", True)
    assert rows["prune 25%, tuned"].why == "it meets the targets"


def exactly(ratio):
    return Ratio(median=ratio, low=ratio, high=ratio)


def test_fewer_bits_until_the_drop_is_too_large():
    def drop(made):
        return 0.1 if has(made, "pack", bits=2) else 0.0

    ladder, rows = climb(Scripted(drop), steps=["low_bits"], max_drop=0.01)
    assert [rows[f"{bits} bits"].kept for bits in (4, 3, 2)] == [True, True, False]
    assert ladder.now.name == "3 bits"


def test_too_few_weights_take_it_back_to_the_middle():
    def drop(made):
        kept = [step.keep["0"] for step in made.steps if isinstance(step, ZeroStep)]
        return 0.1 if kept and kept[-1] < 0.1 else 0.0

    _, rows = climb(Scripted(drop), steps=["pack"], max_drop=0.01)
    assert "more weights are kept" in rows["8.0% of the weights"].why
    assert rows["11.0% of the weights + 4 bits, packed"].kept  # the middle of 15 and 8 %


@pytest.mark.parametrize(("code", "goes_on"), [("SH662", True), ("SH401", True), ("SH403", True), ("SH603", False)])
def test_what_a_model_does_not_allow_is_told_and_what_ends_everything_ends_it(code, goes_on):
    workshop = Scripted()

    def refuse(*_, **__):
        raise error(code, "no such operator")

    workshop.take = refuse
    if goes_on:
        _, rows = climb(workshop, steps=["int8", "prune"])
        assert rows["int8"].why == f"{code}: no such operator"
        assert any(name.startswith("prune 25%") for name in rows)
    else:
        with pytest.raises(ShoalError, match="no such operator"):
            climb(workshop, steps=["int8", "prune"])


def test_a_bug_costs_the_rung_that_it_is_in(tmp_path):
    workshop, taking = Scripted(), Scripted().take
    events = [{"code": "BUG", "message": "KeyError: 'weight'", "where": "Traceback ..."}]

    def fail(made, step):
        return _result(None, events, tmp_path, "exit code 1") if isinstance(step, OnnxStep) else taking(made, step)

    workshop.take = fail
    _, rows = climb(workshop, steps=["int8", "prune"])
    assert rows["int8"].why == "a bug: KeyError: 'weight'"
    assert any(name.startswith("prune 25%") for name in rows)


def rung(name, size, drop, latency=None):
    facts = {"part": "validation", "metric": "accuracy", "samples": 100, "parent": 0.9, "changed": 0}
    quality = Quality(**facts, value=0.9 - drop, drop=drop, drop_bound=drop, smallest_bound=0.0)
    return RungReport(name=name, size_ratio=size, quality=quality, eager_ratio={1: latency, 64: 0.1} if latency else {})


def test_the_front_has_what_nothing_beats_in_size_drop_and_latency():
    rows = [
        rung("parent", 1.0, 0.0, 1.0),
        rung(RUNTIME, 0.9, 0.0, 0.1),
        rung("int8", 0.3, 0.001, 0.5),
        rung("beaten", 0.4, 0.001, 0.5),
        rung("faster", 0.4, 0.001, 0.4),
        rung("packed", 0.1, 0.001),
        rung("better", 0.2, 0.0, 1.0),
        RungReport(name="without a file"),
    ]
    assert [one.name for one in best_rungs(rows)] == ["packed", "better", "int8", "faster"]
    assert best_rungs([]) == []
