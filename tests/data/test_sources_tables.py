"""csv and Parquet: what a table becomes, and what is said of a broken one."""

import gzip
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.sources import csv_table, parquet_table
from tests.data.source_helpers import open_failure, open_spec, read_all


@pytest.fixture(params=["memory", "cache"])
def storage(request, monkeypatch):
    """Both ways of a csv: held, and mapped from the cache in many blocks."""
    if request.param == "cache":
        monkeypatch.setattr(csv_table, "SMALL_BYTES", 0)
        monkeypatch.setattr(csv_table, "_BLOCK_BYTES", 64)
    return request.param


# ---- csv ----


def test_csv_columns_and_types(tmp_path, storage):
    (tmp_path / "a.csv").write_text(
        "id,x,when,y,word\n" + "".join(f"{i},{i / 2},2024-01-{i:02d},{i % 3},w{i}\n" for i in range(1, 21))
    )
    source = open_spec(tmp_path, kind="csv", path="a.csv", inputs=["x", "id"], target="y")
    assert source.in_memory == (storage == "memory")
    assert len(source) == 20
    batch = source.take(np.array([4, 0, 4]))
    assert batch.inputs[0].tolist() == [[2.5, 5], [0.5, 1], [2.5, 5]]
    assert batch.target.tolist() == [2, 1, 2]
    assert str(batch.target.dtype) == "torch.int64"
    assert source.column("when").dtype.kind == "M"
    assert source.column("word")[0] == "w1"
    assert source.column("id").tolist() == list(range(1, 21))  # its own
    assert source.column("target").tolist() == [i % 3 for i in range(1, 21)]
    assert set(source.column("size")) == {8}
    assert {"x", "when", "word", "target", "size", "id"} <= set(source.columns())


def test_csv_default_inputs_are_the_numbers_but_the_target(tmp_path, storage):
    (tmp_path / "a.csv").write_text("a,when,b,flag,y\n1,2024-01-01,0.5,true,cat\n2,2024-01-02,1e3,false,ant\n")
    source = open_spec(tmp_path, kind="csv", path="a.csv", target="y")
    batch = read_all(source)
    assert batch.inputs[0].tolist() == [[1, 0.5, 1], [2, 1000, 0]]
    assert source.classes == ("ant", "cat")
    assert batch.target.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("target_as", "target", "wanted", "dtype"),
    [
        ("auto", "n", [3, 10, 3], "torch.int64"),
        ("number", "n", [3, 10, 3], "torch.float32"),
        ("class", "n", [0, 1, 0], "torch.int64"),
        ("auto", "f", [0.5, 2, 1], "torch.float32"),
        ("auto", ["n", "f"], [[3, 0.5], [10, 2], [3, 1]], "torch.float32"),
        ("auto", ["n", "m"], [[3, 1], [10, 2], [3, 3]], "torch.int64"),
    ],
)
def test_csv_targets(tmp_path, storage, target_as, target, wanted, dtype):
    (tmp_path / "a.csv").write_text("x,n,f,m\n1,3,0.5,1\n1,10,2,2\n1,3,1,3\n")
    source = open_spec(tmp_path, kind="csv", path="a.csv", inputs="x", target=target, target_as=target_as)
    batch = read_all(source)
    assert batch.inputs[0].shape == (3, 1)
    assert batch.target.tolist() == wanted
    assert str(batch.target.dtype) == dtype


def test_csv_glob_directory_gzip_and_other_dialects(tmp_path, storage):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "1.csv").write_text("x;y\n1;0\n")
    with gzip.open(tmp_path / "d" / "2.csv.gz", "wt") as file:
        file.write("y;x\n1;2\n")  # the columns in another order
    (tmp_path / "d" / "_SUCCESS").write_text("")
    for path in ("d", "d/*.csv*"):
        source = open_spec(tmp_path, kind="csv", path=path, target="y", delimiter=";")
        assert read_all(source).inputs[0].tolist() == [[1], [2]]
    (tmp_path / "bare.csv").write_text("1,2\n3,4\n")
    source = open_spec(tmp_path, kind="csv", path="bare.csv", header=False, target="f1")
    assert read_all(source).target.tolist() == [2, 4]


def test_validation_data_gets_the_classes_of_the_training_data(tmp_path, storage):
    (tmp_path / "train.csv").write_text("x,y\n1,ant\n2,bee\n3,cat\n")
    (tmp_path / "valid.csv").write_text("x,y\n1,cat\n2,bee\n")
    (tmp_path / "other.csv").write_text("x,y\n1,cat\n2,dog\n")
    train = open_spec(tmp_path, kind="csv", path="train.csv", target="y")
    valid = open_spec(tmp_path, kind="csv", path="valid.csv", target="y", training_source=train)
    assert read_all(valid).target.tolist() == [2, 1]
    wrong = open_failure(tmp_path, kind="csv", path="other.csv", target="y", training_source=train)
    assert wrong.code == "SH310"
    assert "dog" in wrong.message
    assert wrong.where.endswith("other.csv:3")


BROKEN = {
    "too few fields": ("x,y\n1,2\n\n3\n4,5\n", "SH304", "a.csv:4"),
    "too many fields": ("x,y\n1,2\n3,4,5\n", "SH304", "a.csv:3"),
    "no number": ('x,y,t\n1,2,"two\nlines"\n1,2,a\nabc,4,b\n', "SH304", "a.csv:5"),
    "missing": ("x,y\n1,2\n,3\n4,5\n", "SH305", "a.csv:3"),
    "NaN": ("x,y\n1,2\nnan,3\n4,5\n", "SH305", "a.csv:3"),
    "infinite": ("x,y\n1,2\n3,4\n-inf,5\n", "SH305", "a.csv:4"),
    "too large": ("x,y\n1,2\n1e300,4\n3,5\n", "SH305", "a.csv:3"),
    "missing target": ("x,y\n1,2\n3,\n4,5\n", "SH305", "a.csv:3"),
    "fraction among classes": ("x,y\n1,two\n2,\n3,one\n", "SH305", "a.csv:3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_csv_bad_rows_fail_with_their_line_or_are_counted(tmp_path, storage, name):
    text, code, where = BROKEN[name]
    (tmp_path / "a.csv").write_text(text)
    spec = {"kind": "csv", "path": "a.csv", "inputs": "x", "target": "y"}
    wrong = open_failure(tmp_path, **spec)
    assert wrong.code == code
    assert wrong.where.endswith(where)
    assert wrong.fix
    source = open_spec(tmp_path, on_bad_row="skip", **spec)
    assert source.skipped_rows == 1
    assert len(read_all(source).target) == len(source) == len(source.column("x")) == 2 - (name == "too many fields")
    again = open_spec(tmp_path, on_bad_row="skip", **spec)
    assert again.skipped_rows == 1


@pytest.mark.parametrize(
    ("text", "spec", "code", "says"),
    [
        ("", {}, "SH302", "empty"),
        ("x,y\n", {}, "SH302", "no rows"),
        ("x,y\n1,2\n", {"target": "z"}, "SH303", "z"),
        ("price,y\n1,2\n", {"inputs": "prise"}, "SH303", "prise"),
        ("x,x\n1,2\n", {}, "SH307", "two columns"),
        ("x,y\na,2\nb,3\n", {"inputs": "x"}, "SH310", "x"),
        ("x,y\na,b\nc,d\n", {}, "SH310", "no column of numbers"),
        ("x,y\n1,b\n2,d\n", {"target": "y", "target_as": "number"}, "SH310", "y"),
        ("x,y\nnan,2\n", {"on_bad_row": "skip", "inputs": "x"}, "SH302", "no good row"),
        (b"x,y\n\xff\xfe,2\n", {}, "SH307", "UTF8"),
    ],
)
def test_csv_errors(tmp_path, storage, text, spec, code, says):
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    wrong = open_failure(tmp_path, kind="csv", path="a.csv", **spec)
    assert wrong.code == code
    assert says in wrong.message
    assert "a.csv" in wrong.where


NUMBERED = "x,y\n" + "1,2\n" * 4
MESSY = {
    "another sign": ("a;b;y\n1;2;3\n", {"target": "y"}, "names one column: 'a;b;y'", 'delimiter: ";"'),
    "tabs": ("a\tb\ty\n1\t2\t3\n", {"target": "y"}, "names one column", r'delimiter: "\t"'),
    "lines above the names": ("# a tool\nx,y\n1,2\n", {}, "one column: '# a tool'", "Delete the lines above"),
    "no names": ("1.5,2\n2.5,3\n", {"target": "y"}, "no column 'y'", "header: false"),
    "one field too few": ("x\n1,2\n", {}, "1 field expected, 2 found", "Fix the row"),
    "names in latin-1": ("höhe,y\n1,2\n".encode("latin-1"), {}, "names of columns cannot be read", "encoding: cp1252"),
    "Parquet": (b"PAR1\x15\x04\xff\xfe", {}, "it is a Parquet file", "kind: parquet"),
    "words in latin-1": ("x,y\n1,hö\n".encode("latin-1"), {"target": "y"}, "invalid UTF8", "encoding: cp1252"),
    "utf-16": ("x,y\n1,2\n".encode("utf-16"), {}, "names of columns cannot be read", "encoding: utf-16"),
    "a word for no value": (f"{NUMBERED}?,2\n", {"target": "y"}, "'?' is not a number", "null_values: ['?']"),
    "such a word, and a policy": (
        f"{NUMBERED}?,2\n", {"target": "y", "missing": {"x": "mean"}}, "'?' is not a number", "null_values: ['?']",
    ),
    "a class among numbers": (f"{NUMBERED}1,cat\n", {"target": "y"}, "'cat' is not a number", "target_as: class"),
    "a time of another form": (
        f"when,{NUMBERED}".replace("\n1", "\n01/03/2024,1"), {"encode": {"when": "calendar"}}, "'01/03/2024' cannot be",
        "2024-03-31",
    ),
    "a column to encode": ("city,x\na,1\n", {"encode": {"ctiy": "onehot"}}, "encode: no column 'ctiy'", "mean 'city'?"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSY)
def test_what_is_said_of_a_messy_csv(tmp_path, name):
    text, spec, says, fix = MESSY[name]
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    wrong = open_failure(tmp_path, kind="csv", path="a.csv", **spec)
    assert says in wrong.message
    assert fix in wrong.fix


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8"])
def test_characters_of_other_systems_are_read(tmp_path, storage, encoding):
    (tmp_path / "a.csv").write_bytes("höhe,y\n1,zwölf\n2,elf\n".encode(encoding))
    source = open_spec(tmp_path, kind="csv", path="a.csv", target="y", encoding=encoding)
    assert source.classes == ("elf", "zwölf")
    assert source.input_columns == ("höhe",)
    assert read_all(source).target.tolist() == [1, 0]


def test_an_unknown_encoding_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown encoding: utf-99"):
        open_spec(tmp_path, kind="csv", path="a.csv", encoding="utf-99")


def test_words_for_no_value_have_the_policy_of_a_missing_one(tmp_path, storage):
    (tmp_path / "a.csv").write_text("x,y\n1,0\n?,1\n-,0\n3,1\n")
    spec = {"kind": "csv", "path": "a.csv", "target": "y", "missing": {"x": "flag"}}
    source = open_spec(tmp_path, null_values=["?", "-"], **spec)
    assert read_all(source).inputs[0].tolist() == [[1, 0], [2, 1], [2, 1], [3, 0]]


@pytest.mark.parametrize("name", ["id", "Unnamed: 0", "", "__index_level_0__"])
def test_numbers_of_rows_among_the_inputs_are_named(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},x,y\n1,2,0\n2,3,1\n")
    said = []
    open_spec(tmp_path, kind="csv", path="a.csv", target="y", notify=said.append)
    assert len([one for one in said if f"'{name}' is among the inputs" in one]) == 1
    open_spec(tmp_path, kind="csv", path="a.csv", target="y", inputs=[name, "x"], notify=said.append)
    assert len(said) == 1


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_are_left_out_are_named(tmp_path, kind):
    """Otherwise nobody would learn that half of his columns train nothing."""
    table = pa.table(
        {"city": ["a", "b"], "x": [1, 2], "sold": ["2024-01-01", "2024-02-01"], "w": ["p", "q"], "y": [0, 1]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("city,x,sold,w,y\na,1,2024-01-01,p,0\nb,2,2024-02-01,q,1\n")
    spec = {"kind": kind, "path": f"a.{kind}", "target": "y", "not_inputs": ("w",)}
    notes = []
    first = open_spec(tmp_path, notify=notes.append, **spec)
    (told,) = notes
    assert "hold no numbers: city, sold; `encode`" in told
    open_spec(tmp_path, notify=notes.append, training_source=first, **spec)
    open_spec(tmp_path, notify=notes.append, encode={"city": "onehot", "sold": "calendar"}, **spec)
    open_spec(tmp_path, notify=notes.append, inputs=["x"], **spec)
    assert notes == [told]


@pytest.mark.parametrize(
    ("spec", "fix"),
    [({}, "missing: {x: mean}"), ({"encode": {"city": "onehot"}, "missing": {"x": 0}}, "{city: unknown}")],
)
def test_a_gap_is_told_with_what_may_stand_for_it(tmp_path, spec, fix):
    (tmp_path / "a.csv").write_text("x,city,y\n1,a,0\n,b,1\n3,,1\n")
    assert fix in open_failure(tmp_path, kind="csv", path="a.csv", target="y", **spec).fix


def test_texts_alone_are_told_with_what_reads_them(tmp_path):
    (tmp_path / "a.csv").write_text("text,y\nhello there,0\nwell,1\n")
    fix = open_failure(tmp_path, kind="csv", path="a.csv", target="y").fix
    assert "encode: {text: onehot}" in fix
    assert "kind: huggingface" in fix


def test_ids_of_which_some_look_like_numbers_stay_apart(tmp_path, storage):
    """As numbers, all that are none would be one NaN: one group of a split."""
    ids = ["6214e9", "11cb48", "103959", "6214e9", "b436b2", "7", "12", "8"]
    rows = "\n".join(f"{i},{word},{i}" for i, word in enumerate(ids))
    (tmp_path / "a.csv").write_text(f"x,cluster,y\n{rows}\n")
    source = open_spec(tmp_path, kind="csv", path="a.csv", inputs=["x"], target="y")
    assert source.column("cluster").tolist() == ids
    assert source.column("x").tolist() == list(range(8))


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "train.csv").write_text("x\n1\n")
    wrong = open_failure(tmp_path, kind="csv", path="trian.csv")
    assert wrong.code == "SH301"
    assert "train.csv" in wrong.fix
    assert "does not exist" in open_failure(tmp_path, kind="csv", path="nowhere/a.csv").message
    assert open_failure(tmp_path, kind="csv", path="*.tsv").code == "SH301"
    assert "price" in open_failure(tmp_path, kind="csv", path="train.csv", inputs="price").message


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_table, "SMALL_BYTES", 0)
    messages = []
    path = tmp_path / "a.csv"

    def read():
        return read_all(open_spec(tmp_path, kind="csv", path=str(path), notify=messages.append)).inputs[0].tolist()

    path.write_text("x\n1\n")
    assert read() == read() == [[1]]
    assert len(messages) == 1
    path.write_text("x\n1\n2\n")
    assert read() == [[1], [2]]
    assert len(messages) == 2


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_csv_gives_back_what_was_written(tmp_path_factory, rows):
    tmp_path = tmp_path_factory.mktemp("csv")
    (tmp_path / "a.csv").write_text("a,b\n" + "".join(f"{a!r},{b!r}\n" for a, b in rows))
    source = open_spec(tmp_path, kind="csv", path="a.csv", inputs=["a", "b"])
    assert np.array_equal(read_all(source).inputs[0].numpy(), np.array(rows, dtype=np.float32))


# ---- Parquet ----


@pytest.fixture(params=["held", "groups", "cache"])
def way(request, monkeypatch):
    """The three ways of a Parquet file."""
    if request.param != "held":
        monkeypatch.setattr(parquet_table, "SMALL_BYTES", 0)
    if request.param == "cache":
        monkeypatch.setattr(parquet_table, "_HUGE_GROUP_BYTES", 0)
    return request.param


def write(path, columns, rows=4):
    pq.write_table(pa.table(columns), path, row_group_size=rows)


def test_parquet_types_blocks_and_order(tmp_path, way):
    n = 10
    write(
        tmp_path / "a.parquet",
        {
            "x": pa.array(np.arange(n) / 2),
            "flag": pa.array([i % 2 == 0 for i in range(n)]),
            "word": pa.array([f"w{i % 3}" for i in range(n)]).dictionary_encode(),
            "when": pa.array(np.arange(n).astype("datetime64[s]")),
        },
    )
    source = open_spec(tmp_path, kind="parquet", path="a.parquet", target="word")
    assert (source.blocks is not None) == (way == "groups")
    if way == "groups":
        assert source.blocks.tolist() == [0, 4, 8]
    ids = np.array([9, 0, 5, 5, 1])
    batch = source.take(ids)
    assert batch.inputs[0].tolist() == [[i / 2, i % 2 == 0] for i in ids]
    assert batch.target.tolist() == [i % 3 for i in ids]
    assert source.classes == ("w0", "w1", "w2")
    assert source.column("target").tolist() == [i % 3 for i in range(n)]
    assert source.column("when").dtype.kind == "M"
    assert source.column("word")[4] == "w1"
    assert set(source.column("size")) == {8}


def test_parquet_files_of_a_directory_and_lists(tmp_path, way):
    (tmp_path / "d").mkdir()
    for part in range(2):
        lists = [[part, i, 7] for i in range(3)]
        write(tmp_path / "d" / f"{part}.parquet", {"tokens": lists, "y": [part + 0.5] * 3}, rows=2)
    source = open_spec(tmp_path, kind="parquet", path="d", inputs="tokens", target="y")
    batch = read_all(source)
    assert batch.inputs[0].tolist() == [[p, i, 7] for p in range(2) for i in range(3)]
    assert str(batch.inputs[0].dtype) == "torch.int64"
    assert batch.target.tolist() == [0.5] * 3 + [1.5] * 3


def test_parquet_of_one_type_is_read_as_that_of_several(tmp_path, way):
    """Columns of float32 alone are converted in one call, others one by one."""
    values = {f"x{i}": np.random.default_rng(i).normal(size=10).astype(np.float32) for i in range(5)}
    write(tmp_path / "one.parquet", values)
    write(tmp_path / "several.parquet", values | {"x3": values["x3"].astype(np.float64)})
    one, several = (
        read_all(open_spec(tmp_path, kind="parquet", path=f"{name}.parquet")) for name in ("one", "several")
    )
    assert one.inputs[0].tolist() == np.stack(list(values.values()), axis=1).tolist()
    assert several.inputs[0].equal(one.inputs[0])


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_parquet_bad_values_fail_with_their_place_or_are_counted(tmp_path, way, value):
    write(tmp_path / "a.parquet", {"x": [0.0, 1, 2, 3, 4, value, 6, 7, 8], "y": list(range(9))})
    wrong = open_failure(tmp_path, kind="parquet", path="a.parquet", target="y")
    assert wrong.code == "SH305"
    assert wrong.where.endswith("a.parquet, row group 1, row 1")
    source = open_spec(tmp_path, on_bad_row="skip", kind="parquet", path="a.parquet", target="y")
    assert source.skipped_rows == 1
    assert read_all(source).target.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert source.column("y").tolist() == source.column("target").tolist() == [0, 1, 2, 3, 4, 6, 7, 8]


def test_parquet_errors(tmp_path, way):
    def code(name, **spec):
        return open_failure(tmp_path, kind="parquet", path=name, **spec).code

    write(tmp_path / "a.parquet", {"x": [1.0], "t": ["a"]})
    write(tmp_path / "none.parquet", {"x": pa.array([], pa.float64())})
    write(tmp_path / "ragged.parquet", {"x": [[1.0], [1.0, 2.0]]})
    (tmp_path / "text.parquet").write_text("x,y\n1,2\n")
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.parquet").write_bytes(b"")
    assert code("a.parquet", inputs="y") == "SH303"
    assert code("a.parquet", inputs="t") == "SH310"
    assert code("none.parquet") == "SH302"
    assert code("empty.parquet") == "SH302"
    assert code("ragged.parquet") == "SH306"
    assert code("text.parquet") == "SH307"
    assert code("cut.parquet") == "SH307"
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "1.parquet", {"x": [1.0]})
    write(tmp_path / "d" / "2.parquet", {"z": [1.0]})
    assert code("d") == "SH303"


# ---- larger than memory ----

MEASURE = """
import sys
import numpy as np
from pydantic import TypeAdapter
from shoal.data.source import open_source
from shoal.spec.sources.config import SourceConfig

def megabytes(field):
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields[field].split()[0]) / 1024

kind, base = sys.argv[1:]
import torch, pyarrow, pyarrow.csv, pyarrow.parquet
import shoal.data.sources.csv_table, shoal.data.sources.parquet_table
before = megabytes("VmHWM")
spec = TypeAdapter(SourceConfig).validate_python({"kind": kind, "path": "big." + kind, "target": "y"})
source = open_source(spec, base_dir=base, cache_dir=base + "/cache")
assert not source.in_memory
total, most = 0, [0.0, 0.0]
for start in range(0, len(source), 1000):
    total += source.take(np.arange(start, min(start + 1000, len(source)))).size
    half = int(total > len(source) // 2)
    most[half] = max(most[half], megabytes("VmRSS"))
print(total, megabytes("VmHWM") - before, most[1] - most[0])
assert len(source.column("target")) == total
"""


def grown(tmp_path, kind):
    """Rows read, the peak in megabytes over all of it, and what the second half of reading added."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), kind, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows, megabytes, later = done.stdout.split()
    return int(rows), float(megabytes), float(later)


@pytest.mark.long
def test_parquet_is_read_in_flat_memory(tmp_path):
    """240 MB as arrays; 16 groups of 4 MB stay decoded, and the peak is about 105 MB at any length."""
    group = {f"x{i}": np.arange(20_000, dtype=np.float32) + i for i in range(49)}
    group["y"] = np.arange(20_000)
    table = pa.table(group)
    with pq.ParquetWriter(tmp_path / "big.parquet", table.schema) as writer:
        for _ in range(60):
            writer.write_table(table)
    rows, megabytes, later = grown(tmp_path, "parquet")
    assert rows == 1_200_000
    assert megabytes < 150
    assert later < 10


@pytest.mark.long
def test_csv_is_read_in_flat_memory(tmp_path):
    """140 MB of text, 200 MB as arrays; the peak is that of converting, about 90 MB at any length."""
    lines = "".join(",".join(str((i * 7 + c) % 100) for c in range(40)) + f",{i % 10}\n" for i in range(4000))
    with open(tmp_path / "big.csv", "w") as file:
        file.write(",".join(f"x{c}" for c in range(40)) + ",y\n")
        for _ in range(300):
            file.write(lines)
    rows, megabytes, later = grown(tmp_path, "csv")
    assert rows == 1_200_000
    assert megabytes < 140
    assert later < 10
