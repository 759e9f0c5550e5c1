"""From a job and a run's directory to everything the loop uses. The order of construction is the order of reading."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import Store
from shoal.data.assemble import Assembled, assemble
from shoal.data.batch import Batch
from shoal.data.deal import make_dealer
from shoal.data.dealers import Dealer
from shoal.data.feed import Feed
from shoal.errors import error
from shoal.events import Stream
from shoal.fleet.membership import Membership
from shoal.parallel.local.outer import Outer
from shoal.parallel.local.pace import Pace
from shoal.parallel.local.replica import LocalReplica
from shoal.parallel.peers import Peers
from shoal.parallel.randomness import Chance
from shoal.parallel.replica import Clipping, Replica
from shoal.parallel.server.coding import Coding
from shoal.parallel.sync.base import Sync
from shoal.parallel.sync.ddp import DdpSync
from shoal.parallel.sync.encoded import EncodedSync
from shoal.parallel.sync.grid import GridSync
from shoal.parallel.sync.lanes import LanesSync
from shoal.parallel.sync.server import ServerSync
from shoal.spec import seeds
from shoal.spec.data import BalancedDeal, Deal
from shoal.spec.job import Job, LocalSync
from shoal.spec.names import expand
from shoal.spec.paths import RunPaths
from shoal.spec.resolve import import_ref
from shoal.spec.shard import NoShard
from shoal.train.blame import blaming
from shoal.train.devices import pick_device
from shoal.train.evaluate import Evaluator
from shoal.train.forming import Mould, mould_for
from shoal.train.loop import Course, Loop
from shoal.train.model import build_optimizer, build_schedule, build_task, start_weights
from shoal.train.pulse import Pulse
from shoal.train.task import Task
from shoal.train.telling import Progress, Teller
from shoal.train.trace import Trace
from shoal.train.watch import Best, EarlyStop


@dataclass(frozen=True)
class Built:
    """What a job becomes before it is run."""

    job: Job
    task: Task
    data: Assembled
    dealer: Dealer
    replica: Replica
    evaluator: Evaluator
    course: Course
    example: Batch
    mould: Mould | None = None
    """Where the model is spread over workers: then the replica has nothing in it before there is a view."""


def build(
    job: Job, *, cache_dir: Path, tell: Callable[..., object], pick: Callable[[str], torch.device] = pick_device
) -> Built:
    """Data, model, optimizer, and a first look at a batch. Tells `built` with the facts."""
    device = pick(job.device if isinstance(job.shard, NoShard) else "cpu")
    data = assemble(
        job.data,
        seed=job.seed,
        base_dir=job.base_dir,
        cache_dir=cache_dir,
        tell=lambda message: tell("note", message=message),
    )
    dealer = make_dealer(
        _placed(job),
        ids=data.train.ids,
        lanes=job.lane_count,
        batch_size=job.batch_size,
        seed=job.seed,
        drop_last=job.drop_last,
        source=data.train.source,
    )
    steps = job.steps or (job.epochs or 1) * dealer.steps_per_epoch
    example = _example(data, dealer)
    mould = None
    if isinstance(job.shard, NoShard):
        task, replica = build_replica(job, device, steps=steps, steps_per_epoch=dealer.steps_per_epoch, tell=tell)
    else:
        mould = mould_for(job, example, steps=steps, steps_per_epoch=dealer.steps_per_epoch)
        task, replica = mould.task, mould.nothing
    if replica.tables and job.sync.kind not in ("server", "auto"):
        raise error("SH418", f"the model has sparse tables, and the job has `sync: {job.sync.kind}`", where="sync")
    if replica.tables and job.codec.kind != "none":
        fix = "Leave `codec` out: only touched rows travel in any case."
        raise error("SH110", "the model has sparse tables, and the job has a codec", where="codec", fix=fix)
    if mould is None:
        with blaming("SH401", "the first batch"):
            replica.probe(example.to(device))
    course = Course(
        steps,
        _evaluate_every(job, dealer.steps_per_epoch),
        job.lane_count,
        pace=pace_of(job),
        fragments=job.sync.fragments if isinstance(job.sync, LocalSync) else 1,
        keep_best=job.checkpoint.keep_best > 0,
        pause_probability=job.faults.pause_probability,
        pause_s=job.faults.pause_s,
    )
    if "validation" in data.others and course.pace.period > min(course.evaluate_every, steps):
        message = (
            f"lanes agree every {course.pace.period} steps (sync.every times sync.settle): "
            f"the validation part, due every {course.evaluate_every}, is measured then and at the end"
        )
        tell("note", message=message)
    chunk = job.evaluate.batch_size or job.batch_size
    evaluator = Evaluator(task, lanes=job.lane_count, chunk=chunk, seed=job.seed, loader=job.data.loader)
    tell(
        "built",
        steps=steps,
        steps_per_epoch=dealer.steps_per_epoch,
        lanes=job.lane_count,
        samples=data.sizes,
        skipped=data.skipped,
        device=str(device),
        **({} if mould else sizes(replica.model)),
    )
    return Built(job, task, data, dealer, replica, evaluator, course, example, mould)


def build_replica(
    job: Job, device: torch.device, *, steps: int, steps_per_epoch: int, tell: Callable[..., object]
) -> tuple[Task, Replica]:
    """The weights at step 0: a pure function of the job."""
    chance = Chance(device)
    chance.fully(job.seed, seeds.MODEL)
    task = build_task(job)
    with blaming("SH204", "making the model"):
        model = task.to(device)
    if job.init_from is not None:
        facts = start_weights(model, job.init_from, base_dir=job.base_dir)
        if facts:
            tell("note", message=f"weights from {job.init_from.path}: {facts['loaded']} tensors", **facts)
    optimizer = task.optimizer(model) or build_optimizer(job.optimizer, model, base_dir=job.base_dir)
    epochs = -(-steps // steps_per_epoch)
    schedule = build_schedule(job.schedule, optimizer, steps=steps, epochs=epochs, base_dir=job.base_dir)
    kind: type[Replica] = Replica
    local: dict[str, Any] = {}
    if isinstance(job.sync, LocalSync):
        kind, local = LocalReplica, {"outer": outer_of(job.sync), "after": partial(pace_of(job).after, steps=steps)}
    replica = kind(
        model,
        optimizer,
        task.loss,
        seed=job.seed,
        schedule=schedule,
        schedule_every=steps_per_epoch if job.schedule and job.schedule.every == "epoch" else 1,
        clipping=Clipping(job.clip.norm, job.clip.value) if job.clip else None,
        autocast=torch.bfloat16 if job.precision == "bf16" else None,
        chance=chance,
        **local,
    )
    return task, replica


def sizes(model: torch.nn.Module) -> dict[str, int]:
    """How many numbers it has, and how many of them may change."""
    every = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in every if p.requires_grad),
    }


def pace_of(job: Job) -> Pace:
    """When lanes agree: after every step, if they do not train by themselves."""
    return Pace(job.sync.every, job.sync.settle) if isinstance(job.sync, LocalSync) else Pace()


def outer_of(sync: LocalSync) -> Callable[[Sequence[torch.Tensor]], Outer]:
    if sync.outer == "average":
        return Outer
    return partial(Outer, lr=sync.lr, momentum=sync.momentum)


def _placed(job: Job) -> Deal:
    """The dealing, with a file of costs found from the job's directory."""
    deal = job.data.deal
    if isinstance(deal, BalancedDeal) and deal.by.endswith(".npy"):
        return deal.model_copy(update={"by": str(Path(job.base_dir) / deal.by)})
    return deal


def _example(data: Assembled, dealer: Dealer) -> Batch:
    """The first lane's first samples, as the model will get them."""
    batch = data.train.source.take(dealer.ids(0, 0))
    return data.train.transform(batch) if data.train.transform else batch


def _evaluate_every(job: Job, steps_per_epoch: int) -> int:
    return job.evaluate.every_steps or (job.evaluate.every_epochs or 1) * steps_per_epoch


def build_loop(
    built: Built,
    paths: RunPaths,
    *,
    membership: Membership,
    peers: Peers,
    stream: Stream,
    pulse: Pulse,
    holds: bool,
    conclude: Callable[[Loop, str], None],
    asked_to_leave: Callable[[], str],
    trace: bool = False,
) -> Loop:
    """The loop of a worker, with everything that talks to the outside."""
    job = built.job
    best = Best(job.best)
    users = [_watcher(name, paths, job) for name in job.watch]
    if trace and built.mould is None:
        users.append(Trace(paths.trace, built.replica))
    watchers = [best, *([EarlyStop(job.stop_early)] if job.stop_early else []), *users]
    teller = Teller(stream, watchers)
    progress = Progress(teller, every_step=bool(users))
    store = open_store(job, paths, tell=teller.tell)
    peers.memories.after = built.course.after
    sync = make_sync(job, built.replica, peers, teller.tell)
    pulse.moved_bytes = sync.moved_bytes
    return Loop(
        built.course,
        replica=built.replica,
        dealer=built.dealer,
        feed=make_feed(built),
        sync=sync,
        peers=peers,
        store=store,
        membership=membership,
        teller=teller,
        progress=progress,
        pulse=pulse,
        evaluator=built.evaluator,
        parts=built.data.others,
        task=built.task,
        best=best,
        holds=holds,
        conclude=conclude,
        asked_to_leave=asked_to_leave,
        mould=built.mould,
    )


def make_feed(built: Built) -> Feed:
    job = built.job
    return Feed(
        built.data.train.source,
        built.dealer,
        seed=job.seed,
        lanes=job.lane_count,
        augment=built.data.augment,
        transform=built.data.train.transform,
        loader=job.data.loader,
    )


def make_sync(job: Job, replica: Replica, peers: Peers, tell: Callable[..., object]) -> Sync:
    way: dict[str, Any] = {"endpoint": peers.endpoint, "token": peers.token}
    if not isinstance(job.shard, NoShard):
        return GridSync(job.ways, **way)
    if job.sync.kind == "ddp":
        return DdpSync(job.lane_count, job.sync.backend, replica.device, **way)
    codec = job.codec.model_dump() if job.codec.kind != "none" else None
    if job.sync.kind == "server":
        coding = Coding(replica, codec, peers, tell, together=job.sync.bound == 0) if codec else None
        return ServerSync(job.lane_count, replica, staleness=job.sync.bound, coding=coding, **way)
    if codec:
        return EncodedSync(job.lane_count, codec, replica, peers=peers, tell=tell)
    return LanesSync(job.lane_count, **way)


def open_store(job: Job, paths: RunPaths, *, tell: Callable[..., object]) -> Store:
    return Store(
        store_path(job, paths),
        job_sha256=job.trunk_sha256(),
        every=job.checkpoint.interval,
        keep=job.checkpoint.keep,
        keep_best=job.checkpoint.keep_best,
        sign=job.best.sign,
        tell=tell,
        name=paths.checkpoint_name,
    )


def store_path(job: Job, paths: RunPaths) -> str:
    where = job.checkpoint.path
    return f"{where.rstrip('/')}/{paths.whole.name}" if where else str(paths.checkpoints)


def _watcher(ref: Any, paths: RunPaths, job: Job) -> Any:
    kind = import_ref(expand(ref, field="watch"), base_dir=job.base_dir)
    if not callable(kind):
        return kind
    args = dict(ref.args)
    if "directory" in inspect.signature(kind).parameters:
        args.setdefault("directory", str(paths.root / "tensorboard"))
    with blaming("SH208", f"watch {ref.name}"):
        made = kind(**args)
    if not hasattr(made, "watch"):
        raise error("SH206", f"'{ref.name}' has no method watch(event)", where="watch")
    return made
