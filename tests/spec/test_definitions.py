"""Where the code of a name is, read from source: the ways to import, to define and to hide it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ErrorGroup
from shoal.spec.base import Ref
from shoal.spec.definitions import Definition
from shoal.spec.job import Job
from shoal.spec.load import make_job
from shoal.spec.names import check_names, find_definitions
from shoal.spec.trust import CodeTrust, require_trust

FILES = {
    "model.py": """
        import os, pkg.deep as deep, layers
        from os import system
        from pkg import Thing, deep as again
        from pkg.deep import maker as renamed
        from .layers import Layer
        from stars import *
        class Net: ...
        def make(): ...
        WIDTH = 3
        SAMPLES = [1, 2]
        run = os.system
        try:
            from nowhere import Maybe
        except ImportError:
            Maybe = None
        """,
    "layers.py": "class Layer: ...",
    "stars.py": "from pkg.deep import *",
    "pkg/__init__.py": "from .deep import Thing\nfrom . import deep\n",
    "pkg/deep.py": "class Thing: ...\ndef maker(): ...\nstarred = make()\n",
    "circle.py": "from other import x",
    "other.py": "from circle import x",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        lines = text.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(line[indent:] for line in lines) + "\n")
    return tmp_path


def found(folder: Path, name: str) -> list[tuple[str, str]]:
    places = find_definitions(Ref(name=name), field="model", base_dir=str(folder))
    return [(one.kind, one.module or Path(one.path).name) for one in places]


@pytest.mark.parametrize(
    ("name", "kind", "place"),
    [
        ("Net", "class", "model.py"),
        ("make", "function", "model.py"),
        ("WIDTH", "value", "model.py"),
        ("run", "other", "model.py"),
        ("Net.make", "other", "model.py"),
        ("Layer", "class", "layers.py"),
        ("layers", "module", "layers"),
        ("layers.Layer", "class", "layers"),
        ("Thing", "class", "pkg.deep"),
        ("deep", "module", "pkg.deep"),
        ("again.maker", "function", "pkg.deep"),
        ("renamed", "function", "pkg.deep"),
        ("starred", "other", "pkg.deep"),
        ("system", "other", "os"),
        ("os.system", "other", "os"),
    ],
)
def test_a_name_is_followed_to_its_code(folder: Path, name: str, kind: str, place: str) -> None:
    assert found(folder, f"model.py:{name}") == [(kind, place)]


def test_a_name_with_two_origins_has_two(folder: Path) -> None:
    assert found(folder, "model.py:Maybe") == [("other", "nowhere"), ("value", "model.py")]


def test_imports_in_a_circle_end(folder: Path) -> None:
    assert found(folder, "circle:x") in ([("other", "circle")], [("other", "other")])


def job(folder: Path, **changes: object) -> Job:
    plain = {"name": "a", "model": "model.py:Net", "loss": "MSELoss", "steps": 1,
             "data": {"source": {"kind": "sklearn", "name": "digits"}}}  # fmt: skip
    return make_job(plain | changes, base_dir=folder, check_names=False)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("os:system", "SH210", "is of os"),
        ("subprocess:Popen", "SH210", "is of subprocess"),
        ("builtins:exec", "SH210", "is of builtins"),
        ("model.py:system", "SH210", "is of os"),
        ("model.py:os.system", "SH210", "is of os"),
        ("model.py:WIDTH", "SH206", "plain value"),
        ("model.py:layers", "SH206", "is a module"),
        ("torch.nn:functional", "SH206", "is a module"),
    ],
)
@pytest.mark.parametrize("field", ["model", "loss", "optimizer", "schedule", "metrics", "watchers"])
def test_what_a_field_cannot_use_is_refused_unread(folder: Path, field: str, name: str, code: str, words: str) -> None:
    (problem,) = check_names(job(folder, **{field: [name] if field in ("metrics", "watchers") else name}))
    assert (problem.code, problem.where.partition(".")[0]) == (code, field)
    assert words in problem.message


def test_a_list_of_samples_is_a_dataset(folder: Path) -> None:
    data = {"source": {"kind": "python", "factory": "model.py:SAMPLES"}}
    assert check_names(job(folder, data=data)) == []


# ---- trust ----


@pytest.mark.parametrize(
    ("name", "allow", "missing"),
    [
        ("model.py:Net", "", "model.py"),
        ("model.py:Net", "model.py", ""),
        ("model.py:Net", "model", "model.py"),
        ("model:Net", "model", ""),
        ("model.py:Net", "other.py,pkg", "model.py"),
        ("model.py:Thing", "model.py", "pkg.deep"),
        ("model.py:Thing", "model.py, pkg", ""),
        ("model.py:Layer", "model.py,layers.py", ""),
        ("model.py:system", "model.py", "os"),
        ("pkg.deep:Thing", "pkg", ""),
        ("pkg.deep:Thing", "pk", "pkg.deep"),
        ("os:system", "model.py", "os"),
        ("torch.hub:load", "", "torch.hub"),
        ("torch.nn:Linear", "", ""),
        ("torch.nn:functional.torch.hub.load", "", "torch.nn"),
        ("missing.py:Net", "", "missing.py"),
        ("missing.py:Net", "missing.py", ""),
    ],
)
def test_code_that_is_not_allowed_is_named(folder: Path, name: str, allow: str, missing: str) -> None:
    found = job(folder, model=name, optimizer="AdamW", schedule="StepLR", metrics=["accuracy", "f1"])
    if not missing:
        require_trust(found, CodeTrust.from_text(allow))
        return
    with pytest.raises(ErrorGroup) as caught:
        require_trust(found, CodeTrust.from_text(allow))
    assert (caught.value.errors[0].code, caught.value.errors[0].where) == ("SH209", "model")
    assert f"--allow {missing}" in caught.value.errors[0].fix
    require_trust(found, CodeTrust(everything=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": ["torchmetrics.text:BERTScore"]},
        {"watchers": ["tensorboard"]},
        {"data": {"source": {"kind": "python", "factory": "joblib:load"}}},
        {"data": {"source": {"kind": "sklearn", "name": "digits"}, "augment": "model.py:make"}},
        {"loss": "torch.utils.cpp_extension:load"},
    ],
    ids=str,
)
def test_every_field_needs_trust(folder: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ErrorGroup):
        require_trust(job(folder, model="torch.nn:Linear", **changes), CodeTrust())


def test_a_file_is_allowed_by_its_place_not_by_its_name(folder: Path) -> None:
    elsewhere = Definition("class", "", str(folder / "pkg" / "model.py"))
    assert not CodeTrust(modules=("model.py",)).allows(elsewhere, base=folder)
    assert CodeTrust(modules=("pkg/model.py",)).allows(elsewhere, base=folder)
