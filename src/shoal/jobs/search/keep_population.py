"""Space for the checkpoints of a population: states that no member will copy any more are deleted."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import list_manifests, manifest_directory, manifest_path
from shoal.jobs.search.journal import ShapeRow
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.shared_files import file_sizes, total_bytes
from shoal.plan.search.ledger import Ledger
from shoal.plan.search.policies.population import Population, last_of_lines
from shoal.spec.run_paths import RunPaths


class PopulationKeeper:
    """Members may copy each other's states, so a state is kept while a member may need it. If all are more than
    `limit_bytes`, those that nobody needs are deleted; the newest state of a member always stays."""

    def __init__(self, policy: Population, paths: SearchPaths, limit_bytes: int | None) -> None:
        self._policy, self._paths, self._limit_bytes = policy, paths, limit_bytes

    def make_room(self, ledger: Ledger, shapes: Mapping[int, ShapeRow], *, busy: Collection[int]) -> None:
        """Trials in `busy` keep theirs."""
        if self._limit_bytes is None:
            return
        resting = [t.number for t in ledger.trials if t.number not in busy and self._paths.trial(t.number).job.exists()]
        if total_bytes(file_sizes(self._paths.trial(number)) for number in resting) <= self._limit_bytes:
            return
        earliest, last = self._policy.earliest_copy(ledger), last_of_lines(ledger)
        for number in resting:
            boundaries = shapes[number].boundaries
            needed = set(boundaries[max(earliest - 1, 0) :])
            prune(self._paths.trial(number), needed, keep_newest=number in last)


def prune(paths: RunPaths, needed: Collection[int], *, keep_newest: bool) -> None:
    """Delete the checkpoints of a run that nobody drives, in its own directory, except those at the steps `needed`."""
    files, directory = open_files(paths.checkpoints), manifest_directory(paths.checkpoint_namespace)
    found = list_manifests(paths.checkpoints, name=paths.checkpoint_namespace)
    kept = [m for i, m in enumerate(found) if m.step in needed or (keep_newest and i == 0)]
    if len(kept) == len(found):
        return
    for manifest in found:
        if manifest not in kept:
            files.remove(manifest_path(directory, manifest.step))
    blobs = {digest for manifest in kept for digest in manifest.blobs}
    for path in files.sizes("blobs"):
        if path.rpartition("/")[2] not in blobs:
            files.remove(path)
