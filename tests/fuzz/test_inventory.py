"""Each module that reads what another process sent or a file holds is attacked by a test, and the table of the fuzzers
says so. A module that begins to read fails here until somebody has thought of who may lie to it."""

import re
from pathlib import Path

import shoal

SOURCE = Path(shoal.__file__).parent
TESTS = Path(__file__).parents[1]
READS = re.compile(
    r"json\.loads?\(|validate_json\(|\bTarInfo\.|zipfile\.ZipFile\(|gzip\.open\(|safe_open\(|sqlite3\.connect\("
    r"|decompressobj\(|LZMADecompressor\(|read_exactly\(|receive_exactly\("
)
OWN = "what this process has made itself, or its own parent or child says"
DATA = "the user's data: tests/data"
ATTACKED = {
    "checkpoint/driver_files.py": "fuzz/test_file_service.py",
    "checkpoint/export.py": "fuzz/test_kept_files.py",
    "checkpoint/manifest.py": "fuzz/test_files.py",
    "checkpoint/model_check.py": "fuzz/test_kept_files.py",
    "checkpoint/model_code.py": "fuzz/test_archives.py",
    "checkpoint/state_format.py": "fuzz/test_kept_files.py",
    "checkpoint/store.py": OWN,
    "cli/search.py": OWN,
    "collectives/transport/bandwidth.py": OWN,
    "collectives/transport/greeting.py": "fuzz/test_server_ports.py",
    "compression/packed_file.py": "fuzz/test_kept_files.py",
    "data/datasets.py": OWN,
    "data/sources/array_files.py": DATA,
    "data/sources/csv_table.py": "fuzz/test_kept_files.py",
    "data/sources/parquet_table.py": DATA,
    "data/sources/tar_shards.py": DATA,
    "data/sources/text.py": DATA,
    "events/packed_file.py": "fuzz/test_kept_files.py",
    "events/snapshot.py": "fuzz/test_files.py",
    "events/stream.py": "fuzz/test_files.py",
    "events/summary_index.py": "fuzz/test_files.py",
    "fleet/agents/agent_pipe.py": "fuzz/test_agent_pipes.py",
    "fleet/agents/ray_bridge.py": OWN,
    "fleet/driver_address.py": "fuzz/test_files.py",
    "fleet/engines/agent_records.py": "fuzz/test_kept_files.py",
    "fleet/forkserver_main.py": OWN,
    "fleet/profile_request.py": "fuzz/test_kept_files.py",
    "jobs/compression/answers.py": "fuzz/test_compression_answers.py",
    "jobs/compression/shrink_legs.py": "fuzz/test_kept_files.py",
    "jobs/inspection/profiles.py": "fuzz/test_kept_files.py",
    "jobs/plan_file.py": "fuzz/test_kept_files.py",
    "jobs/predictions.py": "fuzz/test_kept_files.py",
    "jobs/queue/access_tokens.py": "fuzz/test_kept_files.py",
    "jobs/queue/network/messages.py": "fuzz/test_queue_port.py",
    "jobs/queue/queue_file.py": "jobs/queue/test_queue_store.py",
    "jobs/queue/queue_store.py": "jobs/queue/test_queue_store.py",
    "jobs/queue/verification.py": "fuzz/test_kept_files.py",
    "jobs/run_dir.py": "fuzz/test_kept_files.py",
    "jobs/run_index.py": "fuzz/test_kept_files.py",
    "jobs/search/journal.py": "fuzz/test_kept_files.py",
    "jobs/search/receipt.py": "fuzz/test_kept_files.py",
    "jobs/search/summary.py": OWN,
    "jobs/verify.py": "fuzz/test_kept_files.py",
    "net/file_transfer.py": "fuzz/test_file_service.py",
    "net/handshake.py": "fuzz/test_control_port.py",
    "net/messages.py": "fuzz/test_control_port.py",
    "paramserver/messages.py": "fuzz/test_server_ports.py",
    "server/config.py": "fuzz/test_kept_files.py",
    "server/numpy_format.py": "fuzz/test_kept_files.py",
    "server/snapshot.py": "fuzz/test_kept_files.py",
    "spec/compression/measured.py": "fuzz/test_kept_files.py",
    "spec/receipt.py": "fuzz/test_files.py",
    "spec/remote/code_directory.py": "fuzz/test_archives.py",
    "spec/remote/file_requests.py": "fuzz/test_file_service.py",
    "storage/archive.py": "fuzz/test_kept_files.py",
    "storage/cleanup.py": "fuzz/test_kept_files.py",
    "storage/export.py": "fuzz/test_kept_files.py",
    "storage/history.py": "fuzz/test_kept_files.py",
    "storage/mlflow_export.py": "storage/test_mlflow_export.py",
    "storage/tags.py": "fuzz/test_kept_files.py",
    "storage/trash.py": "fuzz/test_kept_files.py",
    "strategies/self_check/verdict.py": "fuzz/test_kept_files.py",
    "terminal/search_live.py": OWN,
    "train/compression/quality.py": "fuzz/test_compression_answers.py",
    "train/profile_pair.py": OWN,
    "web/client.py": "web/test_client.py",
    "web/searches.py": OWN,
    "web/table.py": "web/test_schemathesis.py",
}


def test_whoever_reads_is_attacked():
    found = {
        path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if READS.search(path.read_text("utf-8"))
    }
    assert found == set(ATTACKED)


def test_the_attacks_are_there_and_are_told():
    told = (TESTS.parent / "CONTRIBUTING.md").read_text("utf-8")
    for test in set(ATTACKED.values()) - {OWN, DATA}:
        assert (TESTS / test).is_file(), test
        assert Path(test).name in told, test
