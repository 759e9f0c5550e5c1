"""Spark: tables that it wrote."""

import datetime
import decimal
import shutil

import pytest

from tests.compat.same_bits import assert_same_bits
from tests.conftest import MLP

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Trips as Spark writes them: partitions of year and site, nested fields, an array, and every type of a number."""
    spark_sql = pytest.importorskip("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    place = tmp_path_factory.mktemp("spark")
    builder = spark_sql.SparkSession.builder.master("local[1]").appName("shoal")
    options = {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "512m",
        "spark.local.dir": str(place / "scratch"),
        "spark.sql.session.timeZone": "UTC",
    }
    for name, value in options.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        session.createDataFrame([_row(i) for i in range(240)], schema=SCHEMA).write.partitionBy("year", "site").parquet(
            str(place / "trips")
        )
    finally:
        session.stop()
    return place / "trips"


SCHEMA = (
    "a byte, b short, c int, d bigint, e float, f double, price decimal(10,2), ok boolean, city string, "
    "seen timestamp, born date, inner struct<x: double, deep: struct<z: int>>, vector array<double>, "
    "year int, site string, label int"
)


def _row(i):
    seen = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(hours=i)
    return (
        i % 100, i, i, i, i / 7, i / 3, decimal.Decimal(i) / 4, i % 3 == 0, None if i % 10 == 0 else f"city {i % 4}",
        seen, datetime.date(1990, 1, 1 + i % 28), {"x": i / 2, "deep": {"z": i}}, [i / 5, 1.0, float(i % 2)],
        2023 + i % 2, None if i % 40 == 0 else ["north", "south"][i % 2], i % 2,
    )  # fmt: skip


@pytest.mark.compat("tables that Spark wrote: partitions, nested fields, its types", "works", how="`kind: parquet`")
def test_a_table_of_spark(run, resume, job_dir, table):
    shutil.copytree(table, job_dir / "trips")
    source = {
        "kind": "parquet",
        "path": "trips",
        "target": "label",
        "encode": {"city": "onehot", "seen": "calendar", "born": "standard", "site": "number"},
        "missing": {"city": "unknown", "site": "unknown"},
    }
    # Eight numbers, six of the calendar, born, four cities, two of the struct, three of the array, year, and site.
    model = {"name": "models.py:mlp", "args": {"inputs": 26, "classes": 2}}
    data = {"source": source, "split": {"kind": "holdout", "validation": 0.25}}
    job = MLP | {"model": model, "data": data, "batch_size": 16, "steps": 10, "evaluate": {"every_steps": 5}}
    assert_same_bits(run, resume, job, job_dir)
