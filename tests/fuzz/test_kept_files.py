"""Every other file that Shoal writes and reads back, damaged: whoever reads it gets an answer, or an error with a code.

Streams of events, receipts, snapshots, indexes, addresses and manifests have more to keep to: see test_files.py. What
a compression keeps is in test_compression_answers.py, archives of code in test_archives.py.
"""

import gzip
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

from shoal.checkpoint import model_check, model_code
from shoal.checkpoint.example_inputs import describe_example, make_example
from shoal.checkpoint.export import export_model, load_weights
from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.compression.packed_file import read_packed, write_packed
from shoal.data.sources import csv_table
from shoal.errors import ShoalError, error_from_fields
from shoal.fleet.engines.agent_records import AgentRecords
from shoal.fleet.profile_request import read_profile_request
from shoal.jobs import plan_file, predictions, run_dir, run_index, verify
from shoal.jobs.compression import shrink_legs
from shoal.jobs.inspection import profiles
from shoal.jobs.inspection.trace_merge import merge_traces, operator_times
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.jobs.queue.network.messages import ANSWER, parse
from shoal.jobs.queue.verification import VERDICT, KeptVerdict, read_verdict
from shoal.jobs.run_executor import load_run_state
from shoal.jobs.search.receipt import read_receipt
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.summary import read_search
from shoal.net.errors import LinkError
from shoal.plan.fault_plan import read_fault_plan
from shoal.server import numpy_format, snapshot
from shoal.server.config import StandaloneServerConfig, build_config
from shoal.spec.compression.measured import (
    REPORT,
    AskedCompression,
    Recipe,
    read_asked,
    read_recipe,
    read_report,
)
from shoal.spec.load import load_run_job
from shoal.spec.remote.hostfile import parse_hostfile
from shoal.spec.run_paths import RunPaths
from shoal.storage import archive, cleanup, tags, trash
from shoal.storage.compaction import compact_run, expand_run
from shoal.storage.history import RunHistory
from shoal.strategies.self_check.verdict import CheckReport
from tests.conftest import long_only
from tests.data.source_helpers import open_spec
from tests.fuzz.grammar import damaged, mutated, raw_bytes
from tests.fuzz.test_files import examples
from tests.jobs.past_run import write_run
from tests.jobs.test_replanner import plan_file as sound_plan
from tests.web.past_work import write_compression, write_search

FEW, MANY = 8, 1500
KINDS = {}
TREE = {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.ones(3)}


def kind(name):
    """`make(root)` writes a sound file, and returns its path and what reads it."""
    return lambda make: KINDS.setdefault(name, make)


@kind("tags")
def _(root):
    tags.change_tags(root, "mlp-1", add=["best"])
    return root / tags.TAGS_FILE, lambda: (run_dir.reserve("mlp", root), tags.read_tags(root), tags.require_tags(root))


@kind("trash")
def _(root):
    entry = trash.move_to_trash(write_run(root / "mlp-1"), root)
    return entry.directory / trash.ENTRY_FILE, lambda: (run_dir.reserve("mlp", root), trash.list_trash(root))


@kind("cleanup plan")
def _(root):
    name = cleanup.save_plan(root, [{"run": "x", "part": "", "freed_bytes": 1, "job_mtime_ns": 2, "events_bytes": 3}])
    path = root / cleanup.PLANS / f"{name}.json"
    sound = path.read_bytes()

    def read():
        try:
            cleanup.apply_plan(root, name)
        finally:
            path.write_bytes(sound)  # it was carried out

    return path, read


@kind("tokens")
def _(root):
    TokenFile(root).create("ann", role="submit", runs=["mlp-1"], expires_t=None)
    (path,) = (one for one in root.iterdir() if "token" in one.name and one.suffix == ".json")
    return path, lambda: [TokenFile(root).read(), TokenFile(root).find("x"), TokenFile(root).find_by_key("x")]


@kind("trace of digests")
def _(root):
    path = root / "trace.jsonl"
    path.write_text('{"step": 1, "tensors": {"w": "ab"}}\n{"step": 2, "tensors": {"w": "cd"}}\n')
    return path, lambda: verify.first_difference(verify.read_trace(path), {1: {"w": "x"}})


@kind("plan of a run")
def _(root):
    paths = write_run(root / "mlp-1")
    sound_plan().write(paths)
    assert plan_file.read_plan_file(paths) is not None
    return paths.plan, lambda: plan_file.read_plan_file(paths)


@kind("request for a profile")
def _(root):
    path = root / "request"
    path.write_text('{"name": "5f-0a", "first_step": 3, "steps": 2}')
    return path, lambda: read_profile_request(path)


@kind("summary of a profile")
def _(root):
    paths = RunPaths(root)
    paths.profiles.mkdir()
    row = {"name": "aten::mm", "calls": 1, "total_us": 2.0, "self_us": 1.0}
    told = {"name": "5f", "t": 1.0, "first_step": 1, "steps": 2, "workers": ["worker-0"], "missing": {},
            "size_bytes": 3, "operators": [row]}  # fmt: skip
    (paths.profiles / "5f.summary.json").write_text(json.dumps(told))
    return paths.profiles / "5f.summary.json", lambda: profiles.list_profiles(paths)


@kind("trace of a profiler")
def _(root):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    path = root / "worker-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": 5, "traceEvents": [event, event]}).encode()))

    def read():
        try:
            found = profiles._read_trace(path)
        except (OSError, EOFError, ValueError, RecursionError, zlib.error):
            return  # `_merge` says why it is missing
        operator_times(merge_traces({"worker-0": found})["traceEvents"])

    return path, read


@kind("journal of a search")
def _(root):
    write_search(root / "small-1")
    paths = SearchPaths(RunPaths.at(root / "small-1"))
    return paths.journal, lambda: read_search(paths)


@kind("receipt of a search")
def _(root):
    path = root / "search.json"
    path.write_text("{}")
    return path, lambda: read_receipt(path)


@kind("job of a run")
def _(root):
    paths = write_run(root / "mlp-1")
    return paths.job, lambda: (load_run_job(paths.job), run_index.list_summaries(root))


@kind("model.json")
def _(root):
    paths = write_run(root / "mlp-1")
    model = torch.nn.Linear(4, 3)
    info = {"job": {}, "step": 3, "example": describe_example((torch.ones(2, 4),))}
    made = export_model(
        paths.model, model, info=info, example_inputs=(torch.ones(2, 4),), program=False, emit=lambda *_, **__: None
    )

    def read():
        run_index._exported_step(paths), predictions._fitted(paths)
        found = model_code.read_model_info(paths.model)
        model_check.verify_model(paths.model, weights_sha256=made["weights_sha256"])
        make_example(found.get("example"))

    return paths.model / model_check.MODEL_INFO, read


@kind("weights")
def _(root):
    path = root / "model.safetensors"
    save_file(TREE, path)
    return path, lambda: load_weights(path)


@kind("packed weights")
def _(root):
    path = root / "model.packed"
    write_packed(path, TREE, bits=4)
    return path, lambda: read_packed(path)


@kind("verdict of a verification")
def _(root):
    (root / VERDICT).write_text(KeptVerdict(workers=(1, 2)).model_dump_json())
    return root / VERDICT, lambda: read_verdict(root)


@kind("recipe")
def _(root):
    step = {"kind": "zero", "keep": {"0": 0.5}}
    digests = dict.fromkeys(("parent_sha256", "job_sha256", "artefact_sha256", "weights_sha256"), "a" * 64)
    recipe = Recipe.model_validate({"parent": "x", "steps": [step], "artefact": "model.onnx", **digests})
    (root / "recipe.json").write_text(recipe.model_dump_json())
    return root / "recipe.json", lambda: read_recipe(root / "recipe.json")


@kind("what a compression was asked for")
def _(root):
    asked = AskedCompression.model_validate({"parent": "/runs/mlp-1", "config": {"max_drop": "1%"}, "workers": "1..2"})
    (root / "asked.json").write_text(asked.model_dump_json())
    return root / "asked.json", lambda: read_asked(root / "asked.json")


@kind("report of a compression")
def _(root):
    paths = write_compression(root / "mlp-1")
    return paths.root / REPORT, lambda: (read_report(paths.root / REPORT), run_index.list_summaries(root))


@kind("second leg")
def _(root):
    first, _ = write_run(root / "mlp-1"), write_run(root / "mlp-2")
    (first.root / shrink_legs.SECOND_LEG).write_text('{"run": "mlp-2"}')
    return first.root / shrink_legs.SECOND_LEG, lambda: shrink_legs.last_leg(first)


@kind("agents that outlive a driver")
def _(root):
    AgentRecords(RunPaths(root)).add()
    return RunPaths(root).kept_agents, lambda: AgentRecords(RunPaths(root)).kept


@kind("list of an archive")
def _(root):
    (root / "runs").mkdir()
    archive.archive_run(write_run(root / "mlp-1"), f"file://{root}/kept")

    def read():
        for found in (root / "runs").iterdir():
            trash.shutil.rmtree(found)
        archive.fetch_run(f"file://{root}/kept/mlp-1", root / "runs")

    return root / "kept" / "mlp-1" / archive.LIST, read


@kind("packed events")
def _(root):
    paths = write_run(root / "mlp-1")
    compact_run(paths)

    def read():
        run_index.list_summaries(root)
        load_run_state(paths)
        expand_run(paths)
        compact_run(paths)

    return paths.events.with_name("events.jsonl.gz"), read


@kind("curves of a run")
def _(root):
    paths = write_run(root / "mlp-1")
    history = RunHistory(paths)
    history.catch_up()
    history.save()
    return paths.history, lambda: RunHistory(paths).catch_up()


@kind("servers of shoal.server")
def _(root):
    values = {"w": np.ones(3, np.float32)}
    build_config(values, optimizer={"name": "SGD", "args": {"lr": 0.1}}, workers=1).write(root)
    return root / "servers.json", lambda: StandaloneServerConfig.read(root)


@kind("snapshot of shoal.server")
def _(root):
    values = {"w": np.ones(3, np.float32)}
    held = snapshot.ServerSnapshot(values, {"w": {"step": 1.0, "m": np.ones(3, np.float32)}}, [4, 7])
    path, header = root / "kept.safetensors", root / "header"
    snapshot.save(held, path, optimizer={"name": "SGD"})
    with safe_open(path, framework="numpy") as file:
        header.write_text(file.metadata()["shoal"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict

    def read():
        save_numpy(arrays, path, {"shoal": header.read_bytes().decode(errors="replace")})
        snapshot.load(path)

    return header, read


@kind("state in numpy's form")
def _(root):
    return forged_state(root, numpy_format.pack({"a": [np.ones(3), 1.5, {"b": None}]}), numpy_format.unpack)


@kind("state")
def _(root):
    return forged_state(root, pack_state({"a": [torch.ones(3), 1.5, {"b": None}]}), unpack_state)


def forged_state(root, sound, unpack):
    """The file is its header, which is JSON: checksums are no secret."""
    start = struct.Struct("<8sQI")
    magic, size, _ = start.unpack_from(sound)
    (root / "state").write_bytes(sound[start.size : start.size + size])

    def read():
        header = (root / "state").read_bytes()
        unpack(start.pack(magic, len(header), zlib.crc32(header)) + header + sound[start.size + size :])

    return root / "state", read


@kind("report of a self-check")
def _(root):
    (root / "report").write_bytes(CheckReport(lane=1, checked_sums=["ab"], step_s=0.5).pack())
    return root / "report", lambda: CheckReport.unpack((root / "report").read_bytes())


def cached(root, name):
    """The file of this name in the cache of a table. Its numbers are like any others: only its form is checked."""
    (root / "table.csv").write_text("a,b,label\n" + "1.5,2,yes\n3,4,no\n" * 20)

    def read():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(csv_table, "SMALL_BYTES", 0)
            source = open_spec(root, kind="csv", path="table.csv", inputs=["a", "b"], target="label")
            assert len(source) >= 0

    read()
    (found,) = (root / "cache").rglob(name)
    return found, read


@kind("notes of a cached table")
def _(root):
    return cached(root, "survey.json")


@kind("numbers of a cached table")
def _(root):
    return cached(root, "inputs.npy")


@kind("hostfile")
def _(root):
    (root / "hosts").write_text("one slots=2 # fast\ntwo python=/opt/python\n")
    return root / "hosts", lambda: parse_hostfile((root / "hosts").read_bytes().decode(errors="replace"))


@kind("plan of faults")
def _(root):
    (root / "faults").write_text("kill worker 1 at step 20\njoin at step 30\n")
    return root / "faults", lambda: read_fault_plan(root / "faults")


@kind("answer of a queue")
def _(root):
    (root / "answer").write_text('{"failure": {"code": "SH646", "message": "no such job"}, "quotas": {"ann": 3}}')

    def read():
        if failure := parse(ANSWER, (root / "answer").read_bytes()).failure:
            error_from_fields(failure)

    return root / "answer", read


@st.composite
def damage(draw, sound):
    """Other bytes, or the JSON in them with something else inside it."""
    how = draw(st.sampled_from(["bytes", "bytes", "json", "json", "raw"]))
    if how == "raw":
        return draw(raw_bytes | st.just(b""))
    if how == "json":
        lines = sound.split(b"\n") if sound.count(b"\n{") else [sound]
        at = draw(st.integers(0, len(lines) - 1))
        try:
            lines[at] = json.dumps(draw(mutated(json.loads(lines[at])))).encode()
            return b"\n".join(lines)
        except (ValueError, TypeError):  # no JSON
            pass
    return draw(damaged(sound))


@pytest.mark.parametrize("count", [FEW, *long_only(MANY)])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_damaged_file_is_read_or_is_an_error_with_a_code(tmp_path, name, count):
    path, read = KINDS[name](tmp_path)
    if name != "receipt of a search":
        read()
    sound, seen, refused = path.read_bytes(), [], []

    @examples(count)
    @given(st.data())
    def attack(data):
        content = data.draw(damage(sound))
        path.write_bytes(content)
        seen.append(content)
        try:
            read()
        except (ShoalError, LinkError):
            refused.append(content)

    attack()
    path.write_bytes(sound)
    if name != "receipt of a search":
        read()
    assert len(seen) >= count
    assert len(set(seen)) > count // 2
