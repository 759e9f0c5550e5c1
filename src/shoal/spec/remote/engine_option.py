"""The engine that an option of a command names: by its kind, by its fields, or by a file with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.errors import ErrorGroup, did_you_mean, error
from shoal.spec.base import Spec
from shoal.spec.engine import EngineConfig
from shoal.spec.explain import explain
from shoal.spec.remote.hostfile import engine_with_hosts
from shoal.spec.yaml_document import YAML_FILES, YamlDocument, parse_document, read_document

KINDS = ("local", "ssh", "slurm", "ray")
FORMS = "Or give its fields, '{kind: ssh, hosts: [a, b]}', or a YAML file with them."


class EngineSection(Spec):
    engine: EngineConfig


def parse_engine(text: str, *, option: str = "--engine") -> EngineConfig:
    """`ray`; `{kind: ssh, hosts: [a, b]}`; or a YAML file with a section `engine`, such as a job file, or with the
    fields of one. Paths in it are relative to the file. ErrorGroup or SH609 if it is none of these."""
    document, base = _read(text.strip(), option)
    try:
        engine = EngineSection.model_validate(document.data).engine
        if engine.kind not in KINDS:
            raise _unknown(engine.kind, option)
        return engine_with_hosts(engine, base)
    except ValidationError as failure:
        problems = explain(failure, model=EngineSection)
    except ErrorGroup as failure:
        problems = list(failure.errors)
    raise ErrorGroup([problem.at(document.where(problem.where)) for problem in problems])


def _read(text: str, option: str) -> tuple[YamlDocument, Path]:
    """A document with a section `engine`, and the directory to which its paths are relative."""
    if text.startswith("{"):
        inline = parse_document(text, name=option)
        return _section(YamlDocument(option, inline.data)), Path.cwd()
    if text.endswith(YAML_FILES):
        return _section(read_document(text)), Path(text).parent
    if text not in KINDS:
        raise _unknown(text, option)
    return YamlDocument(option, {"engine": {"kind": text}}), Path.cwd()


def _section(document: YamlDocument) -> YamlDocument:
    """A document that has the section alone. Its short forms are those of a job."""
    data: Any = document.data
    lines = document.lines
    if "engine" in data:
        data = data["engine"]
    else:
        lines = {f"engine.{field}": line for field, line in lines.items()}
    fields = {"kind": "local"} | data if isinstance(data, dict) else {"kind": data}
    return YamlDocument(document.name, {"engine": fields}, lines)


def _unknown(kind: str, option: str) -> Exception:
    return error("SH609", f"there is no engine '{kind}'", where=option, fix=f"{did_you_mean(kind, KINDS)} {FORMS}")
