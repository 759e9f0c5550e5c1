"""Job, seat, view and receipt as frozen, validated data, and how they are loaded."""

from shoal.spec.base import Ref, Spec
from shoal.spec.job import Job
from shoal.spec.load import check_job, load_job, load_run_job, make_job, save_job
from shoal.spec.names import DEFAULT_MODULES, METRIC_ALIASES, WATCH_ALIASES, expand_alias, metric_name, metric_names
from shoal.spec.receipt import Receipt
from shoal.spec.resolve import build_ref, check_ref, import_ref, ref_of
from shoal.spec.rules import has_validation
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat, View

__all__ = [
    "DEFAULT_MODULES",
    "METRIC_ALIASES",
    "WATCH_ALIASES",
    "Job",
    "Receipt",
    "Ref",
    "RunPaths",
    "Seat",
    "Spec",
    "View",
    "build_ref",
    "check_job",
    "check_ref",
    "expand_alias",
    "has_validation",
    "import_ref",
    "load_job",
    "load_run_job",
    "make_job",
    "metric_name",
    "metric_names",
    "ref_of",
    "save_job",
]
