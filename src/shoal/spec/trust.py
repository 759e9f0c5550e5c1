"""Which code of a job from another machine may run on this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ErrorGroup, ShoalError, error
from shoal.spec.base import Ref
from shoal.spec.definitions import Definition
from shoal.spec.job import Job
from shoal.spec.names import DEFAULT_MODULES, METRIC_ALIASES, expand_alias, find_definitions, iter_refs
from shoal.spec.resolve import parse_ref

_BUILDING_BLOCKS = ("shoal.data.augmentations", "torch.nn", "torch.optim", "torch.optim.lr_scheduler")
"""Modules whose classes only compute, whatever their arguments."""
_METRICS = frozenset(ref.name for ref in METRIC_ALIASES.values())


@dataclass(frozen=True)
class CodeTrust:
    """`everything`: all code that the job names. `modules`: modules, packages and files (`model.py`) whose code a job
    may name; files are relative to the directory of the job on this machine."""

    everything: bool = False
    modules: tuple[str, ...] = ()

    @classmethod
    def from_text(cls, allow: str, *, everything: bool = False) -> CodeTrust:
        """From `module,other.module,file.py`."""
        return cls(everything, tuple(filter(None, (one.strip() for one in allow.split(",")))))

    def allows(self, definition: Definition, *, base: Path) -> bool:
        """Whether code of this place may run."""
        return any(
            (base / one).resolve() == Path(definition.path).resolve()
            if one.endswith(".py")
            else f"{definition.module}.".startswith(f"{one}.")
            for one in self.modules
        )


def require_trust(job: Job, trust: CodeTrust) -> None:
    """Raise SH209 for each name of the job whose code is not trusted here. Nothing is imported."""
    problems = [] if trust.everything else list(_untrusted(job, trust))
    if problems:
        raise ErrorGroup(problems)


def _untrusted(job: Job, trust: CodeTrust) -> Iterator[ShoalError]:
    for place, field, ref in iter_refs(job):
        full = expand_alias(ref, field=field)
        if _is_building_block(full, field):
            continue
        name = parse_ref(full)
        named = Definition("other", name.module, str(Path(job.base_dir, name.file)) if name.file else "")
        try:
            found = find_definitions(full, field=field, base_dir=job.base_dir)
        except (SyntaxError, ValueError, OSError):  # a file that is missing or cannot be parsed: its import fails
            found = []
        # The module that the job names is executed, and so is the one that the name comes from.
        needed = dict.fromkeys([named, *found])
        refused = [one for one in needed if not trust.allows(one, base=Path(job.base_dir))]
        if refused:
            yield _refusal(place, full, [_spelling(one, name.file) for one in refused])


def _is_building_block(ref: Ref, field: str) -> bool:
    """Layers, losses, optimizers, schedules and metrics that Shoal has short names for."""
    name = parse_ref(ref)
    modules = (name.module,) if name.module else DEFAULT_MODULES.get(field, ())
    if name.file or len(name.attrs) > 1 or not modules:
        return False
    if any(f"{module}:{name.attrs[0]}" in _METRICS for module in modules):
        return True
    return all(module in _BUILDING_BLOCKS for module in modules)


def _spelling(definition: Definition, file: str) -> str:
    """What to write after --allow."""
    return definition.module or file or definition.path


def _refusal(place: str, ref: Ref, modules: Sequence[str]) -> ShoalError:
    words = ",".join(dict.fromkeys(modules))
    return error(
        "SH209",
        f"the run asks this machine to execute '{ref.name}', and {words} is not allowed here",
        where=place,
        fix=f"If you trust that code: shoal join … --allow {words}. If you trust all code that the run names:"
        " --trust-code.",
    )
