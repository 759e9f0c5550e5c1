"""Names: found without importing, imported, called, and told of objects."""

import functools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.spec import (
    DEFAULT_MODULES,
    METRIC_ALIASES,
    Ref,
    build_ref,
    check_ref,
    expand_alias,
    import_ref,
    metric_name,
    ref_of,
)
from shoal.spec.resolve import is_user_file

NET = """\
import os.path
from collections import OrderedDict as Ordered, deque
from siblings import *

class Net:
    class Inner: ...
    def __init__(self, width, *, depth=2):
        self.width, self.depth = width, depth

def make(**anything): return anything
a = b = 1
(c, d), e = (2, 3), 4
f: int = 5
if True:
    g = 1
else:
    h = 2
try:
    import json as i
except ImportError:
    i = None
finally:
    j = 1
with open(os.devnull) as k: l = 1
for m in (): n = 1
async def o(): ...
def hidden():
    inner = 1
"""
DEFINED = ["Net", "make", "os", "Ordered", "deque", *"abcdefghijklmno", "shared"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of a user's own; what is imported from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "siblings.py").write_text("shared = 1\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def failure(call: Callable[..., Any], *args: Any, **kwargs: Any) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        call(*args, **kwargs)
    return caught.value


# ---- looking ----


@pytest.mark.parametrize("name", DEFINED)
@pytest.mark.parametrize("module", ["net.py", "net"])
def test_every_way_to_define_a_name_is_seen(folder: Path, module: str, name: str) -> None:
    check_ref(f"{module}:{name}", base_dir=folder)


@pytest.mark.parametrize("name", ["inner", "width", "Inner", "collections", "OrderedDict", "path", "json"])
@pytest.mark.parametrize("module", ["net.py", "net"])
def test_what_is_not_at_the_top_level_is_not_there(folder: Path, module: str, name: str) -> None:
    problem = failure(check_ref, f"{module}:{name}", base_dir=folder)
    assert problem.code == "SH202"
    assert "Allowed: Net" in problem.fix


@pytest.mark.parametrize(
    ("field", "good", "bad", "nearest"),
    [
        ("optimizer", ["AdamW", "SGD", "torch.optim.adamw:AdamW"], "adam", "Adam"),
        ("loss", ["CrossEntropyLoss", "torch.nn.functional:cross_entropy", "torch.nn:functional.mse_loss"],
         "MeanSquareLoss", "MSELoss"),
        ("schedule", ["CosineAnnealingLR", "OneCycleLR"], "OnceCycleLR", "OneCycleLR"),
        ("metrics", ["Accuracy", *METRIC_ALIASES], "Acuracy", "Accuracy"),
    ],
)  # fmt: skip
def test_short_names_of_the_installed_packages(field: str, good: list[str], bad: str, nearest: str) -> None:
    for name in good:
        check_ref(expand_alias(Ref(name=name), field=field), base_dir=".", default_modules=DEFAULT_MODULES[field])
    problem = failure(check_ref, bad, base_dir=".", default_modules=DEFAULT_MODULES[field])
    assert problem.code == "SH202"
    assert nearest in problem.fix


def test_looking_executes_nothing(folder: Path) -> None:
    write(folder, "pkg/__init__.py", "raise SystemExit('executed')")
    write(folder, "pkg/deep/mod.py", "raise SystemExit('executed')\nclass A: ...\n")
    check_ref("pkg.deep.mod:A", base_dir=folder)
    check_ref("pkg/deep/mod.py:A", base_dir=folder)


def test_modules_that_make_names_as_they_run_are_trusted(folder: Path) -> None:
    write(folder, "lazy.py", "def __getattr__(name): ...\n")
    write(folder, "dynamic.py", "for n in 'abc':\n    globals()[n] = n\n")
    for name in ("lazy:anything", "dynamic.py:a", "math:sqrt", "_json:make_scanner", "os:getcwd"):
        check_ref(name, base_dir=folder)


def test_a_directory_does_not_hide_an_installed_package(folder: Path) -> None:
    (folder / "json").mkdir()
    check_ref("json:loads", base_dir=folder)


def test_star_imports_are_followed_through_packages(folder: Path) -> None:
    write(folder, "pkg/__init__.py", "from .a import *\n")
    write(folder, "pkg/a.py", "from ..pkg.b import *\n__all__ = ['x']\n__all__ += ['y']\n")
    write(folder, "pkg/b.py", "from pkg.a import *\nz = 1\n")
    for name in "xyz":
        check_ref(f"pkg:{name}", base_dir=folder)


def test_a_star_import_in_a_circle_ends(folder: Path) -> None:
    write(folder, "one.py", "from two import *\n")
    write(folder, "two.py", "from one import *\n")
    check_ref("one:x", base_dir=folder)  # too deep to be sure, so it is left to the import


def test_a_changed_file_is_read_again(folder: Path) -> None:
    failure(check_ref, "siblings.py:later", base_dir=folder)
    write(folder, "siblings.py", "later = 1\n")
    check_ref("siblings.py:later", base_dir=folder)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nett.py:Net", "SH201", "Did you mean 'net.py'?"),
        ("sub/net.py:Net", "SH201", "no directory"),
        ("nett:Net", "SH201", "Did you mean 'net'?"),
        ("no_such_package.x:Y", "SH201", "no_such_package"),
        ("net.sub:Net", "SH201", "net.sub"),
        ("os.pathh:join", "SH201", "os.pathh"),
        ("net.py:net", "SH202", "Did you mean 'Net'?"),
        ("Net", "SH203", "file.py:Net"),
        ("net.Net", "SH203", "Write net:Net."),
        ("net.py", "SH203", "Write net.py:name"),
        ("net.py::Net", "SH203", "Write net.py:Net."),
        ("net.py.Net", "SH203", "Write net.py:Net."),
        ("./net:Net", "SH203", "Write ./net.py:Net."),
        ("net:", "SH203", "package.module:name"),
        ("net.py:Net()", "SH203", "write net.py:Net."),
        ("net.py:Net(3)", "SH203", "write {name: net.py:Net, args: {…}}."),
        ("nn.CrossEntropyLoss()", "SH203", "write CrossEntropyLoss."),
        ("torch.optim.lr_scheduler.StepLR(1)", "SH203", "write {name: StepLR, args: {…}}."),
        ("mine.nets.Net()", "SH203", "write mine.nets:Net."),
        ("", "SH203", "package.module:name"),
    ],
)
def test_names_that_lead_nowhere(folder: Path, name: str, code: str, words: str) -> None:
    problem = failure(check_ref, name, base_dir=folder)
    assert problem.code == code
    assert words in f"{problem.message} {problem.fix}"


@pytest.mark.parametrize("look", [check_ref, import_ref])
@pytest.mark.parametrize("name", ["bad.py:f", "bad:f"])
def test_a_syntax_error_is_told_with_its_line(folder: Path, look: Callable[..., Any], name: str) -> None:
    write(folder, "bad.py", "x = 1\n\ndef f(:\n")
    problem = failure(look, name, base_dir=folder)
    assert (problem.code, problem.where) == ("SH204", f"{folder}/bad.py:3")
    assert "def f(:" in problem.message


# ---- importing ----


def test_a_file_is_one_module_with_one_class(folder: Path) -> None:
    first = import_ref("net.py:Net", base_dir=folder)
    assert import_ref(f"{folder}/net.py:Net", base_dir="/") is first
    assert import_ref("net.py:Net.Inner", base_dir=folder) is first.Inner
    assert pickle.loads(pickle.dumps(first)) is first


def test_files_of_the_same_name_are_different_modules(folder: Path) -> None:
    write(folder, "one/m.py", "x = 1\n")
    write(folder, "two/m.py", "x = 2\n")
    assert [import_ref(f"{part}/m.py:x", base_dir=folder) for part in ("one", "two")] == [1, 2]


def test_siblings_may_be_imported_either_way_and_are_the_same_module(folder: Path) -> None:
    write(folder, "sub/one.py", "from .two import Two\nimport net\n")
    write(folder, "sub/two.py", "class Two: ...\n")
    assert import_ref("sub/one.py:Two", base_dir=folder) is import_ref("sub/two.py:Two", base_dir=folder)


def test_short_names_are_looked_up_in_all_default_modules() -> None:
    assert import_ref("sqrt", base_dir=".", default_modules=["numpy.linalg", "numpy"])(4) == 2


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nett.py:Net", "SH201", "Did you mean 'net.py'?"),
        ("no_such_package.x:Y", "SH201", "no_such_package"),
        ("json.x:Y", "SH201", "json.x"),
        ("net.py:net", "SH202", "Did you mean 'Net'?"),
        ("net:Net.Inne", "SH202", "Did you mean 'Inner'?"),
        ("Net", "SH203", "file.py:Net"),
    ],
)
def test_imports_that_lead_nowhere(folder: Path, name: str, code: str, words: str) -> None:
    problem = failure(import_ref, name, base_dir=folder)
    assert problem.code == code
    assert words in f"{problem.message} {problem.fix}"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("import json\n\njson.loads('{')\n", 3, "JSONDecodeError"),
        ("\nimport no_such_package\n", 2, "Install the package no_such_package"),
        ("from .nowhere import x\n", 1, "Error"),
        ("import sys\nsys.exit(3)\n", 2, "__main__"),
        ("def f():\n    raise KeyError('why')\nf()\n", 2, "KeyError: 'why'"),
    ],
)
@pytest.mark.parametrize("name", ["bad.py:x", "bad:x"])
def test_what_fails_in_the_users_file_is_told_at_its_own_line(
    folder: Path, name: str, text: str, line: int, words: str
) -> None:
    write(folder, "bad.py", text)
    problem = failure(import_ref, name, base_dir=folder)
    assert (problem.code, problem.where) == ("SH204", f"{folder}/bad.py:{line}")
    assert words in f"{problem.message} {problem.fix}"


def test_a_file_that_failed_can_be_mended(folder: Path) -> None:
    write(folder, "bad.py", "raise ValueError\n")
    failure(import_ref, "bad.py:x", base_dir=folder)
    write(folder, "bad.py", "x = 'mended'\n")
    assert import_ref("bad.py:x", base_dir=folder) == "mended"


# ---- calling ----


def build(folder: Path, name: str, *leading: Any, args: dict[str, Any] | None = None, **extra: Any) -> Any:
    return build_ref(Ref(name=name, args=args or {}), *leading, base_dir=folder, **extra)


def test_arguments_come_from_the_job_and_from_the_caller(folder: Path) -> None:
    assert vars(build(folder, "net.py:Net", args={"width": 3})) == {"width": 3, "depth": 2}
    assert vars(build(folder, "net.py:Net", 5, args={"depth": 1})) == {"width": 5, "depth": 1}
    assert build(folder, "net.py:make", args={"a": 1, "b": 2}, b=3) == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("leading", "args", "words"),
    [
        (
            [],
            {"width": 1, "dept": 3},
            "no argument 'dept' Did you mean 'depth'? Allowed: depth, width.",
        ),
        ([], {}, "needs the argument 'width' Add `width:` under `args`."),
        ([1], {"width": 1}, "'width' of net.py:Net is given already Remove it."),
    ],
)
def test_arguments_that_do_not_fit(folder: Path, leading: Any, args: dict[str, Any], words: str) -> None:
    problem = failure(build, folder, "net.py:Net", *leading, args=args)
    assert problem.code == "SH205"
    assert words in f"{problem.message} {problem.fix}"


def test_what_cannot_be_called(folder: Path) -> None:
    assert failure(build, folder, "net.py:a").code == "SH206"


def test_a_call_that_fails_is_told_at_the_users_line(folder: Path) -> None:
    write(folder, "bad.py", "import json\nclass Bad:\n    def __init__(self):\n        json.loads('{')\n")
    problem = failure(build, folder, "bad.py:Bad")
    assert (problem.code, problem.where) == ("SH208", f"{folder}/bad.py:4")


def test_code_without_a_signature_is_called_all_the_same() -> None:
    assert build_ref(Ref(name="torch:zeros", args={"size": [2]}), base_dir=".").tolist() == [0, 0]
    assert failure(build_ref, Ref(name="torch:zeros", args={"a": 1}), base_dir=".").code == "SH208"
    assert failure(build_ref, Ref(name="torch:zeros", args={"size": [2**45]}), base_dir=".").code == "SH407"


@pytest.mark.parametrize(
    "name",
    ["os:system", "subprocess:Popen", "builtins:exec", "shutil:rmtree", "net.py:os.system", "net.py:deque",
     "os:path.join", "taken:run", "taken:call"],
)  # fmt: skip
def test_what_comes_with_python_is_never_called(folder: Path, name: str) -> None:
    write(folder, "taken.py", "from subprocess import run\nimport os as here\ncall = here.system\n")
    problem = failure(build_ref, Ref(name=name, args={"command": f"touch {folder}/executed"}), base_dir=folder)
    assert problem.code == "SH210"
    assert not (folder / "executed").exists()


def test_the_users_own_code_may_be_made_with_pythons(folder: Path) -> None:
    """A partial, a cached function and a module with the name of one of Python's."""
    write(folder, "own.py", "import functools\ndef f(a=1): return a\ng = functools.partial(f, 2)\n"
                            "h = functools.lru_cache(f)\nclass K(dict): ...\n")  # fmt: skip
    write(folder, "antigravity.py", "def f(): return 'mine'\n")
    assert [build(folder, f"own.py:{name}") for name in "fgh"] == [1, 2, 1]
    assert build(folder, "own.py:K") == {}
    assert build(folder, "antigravity:f") == "mine"


# ---- aliases ----


def test_aliases_keep_the_users_arguments() -> None:
    assert expand_alias(Ref(name="rmse"), field="metrics").args == {"squared": False}
    assert expand_alias(Ref(name="rmse", args={"num_outputs": 2}), field="metrics") == Ref(
        name="torchmetrics:MeanSquaredError", args={"squared": False, "num_outputs": 2}
    )
    assert expand_alias(Ref(name="rmse"), field="loss") == Ref(name="rmse")
    assert expand_alias(Ref(name="tensorboard"), field="watchers").name == "shoal.train.watchers:TensorBoard"


@pytest.mark.parametrize(
    ("name", "called"),
    [("f1", "f1"), ("F1Score", "F1Score"), ("torchmetrics:AUROC", "AUROC"), ("a/b.py:C.top5", "top5")],
)
def test_what_a_metric_is_called(name: str, called: str) -> None:
    assert metric_name(Ref(name=name)) == called


# ---- from an object to its name ----


class Here:
    class Inner: ...


def test_objects_of_modules_and_files(folder: Path) -> None:
    assert ref_of(Path) == "pathlib:Path"
    assert ref_of(functools.wraps) == "functools:wraps"
    assert ref_of(Here.Inner) == f"{__name__}:Here.Inner"
    net = import_ref("net.py:Net", base_dir=folder)
    assert ref_of(net) == f"{folder}/net.py:Net"
    assert ref_of(net, base_dir=folder) == "net.py:Net"
    assert import_ref(ref_of(net), base_dir="/") is net


def test_what_only_this_process_knows() -> None:
    class Local: ...

    def renamed() -> None: ...

    renamed.__qualname__ = "renamed"
    for thing in (Local, lambda: 0, renamed, functools.partial(print), Here()):
        assert failure(ref_of, thing).code == "SH608"


SCRIPT = "from shoal.spec import ref_of\nclass A: ...\nprint(ref_of(A))\n"


def test_a_script_is_named_by_its_file(folder: Path) -> None:
    write(folder, "script.py", SCRIPT)
    write(folder, "pkg/script.py", SCRIPT)
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=folder, check=False)
    assert run([sys.executable, "script.py"]).stdout.strip() == f"{folder}/script.py:A"
    assert run([sys.executable, "-m", "pkg.script"]).stdout.strip() == "pkg.script:A"
    assert "SH608" in run([sys.executable, "-c", SCRIPT]).stderr


def test_packages_of_another_environment_are_not_the_users():
    """Such as those of the system, where an environment was made with them, or of the user's own site-packages."""
    for name in ("site-packages", "dist-packages"):
        assert not is_user_file(f"/home/ann/.local/lib/python3.11/{name}/package/a.py")
    assert is_user_file("/home/ann/packages/a.py")
