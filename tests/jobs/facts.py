"""What a machine of four cores would have measured of a job with four lanes."""

FACTS = {
    "lanes": 4,
    "steps_per_epoch": 10,
    "times": [{"threads": 1, "forward_s": 0.02, "backward_s": 0.04, "apply_s": 0.001}],
    "slow_threads": [],
    "shapes": [[100, 100]],
    "stretch_bytes": 40_000,
    "optimizer_bytes": 40_000,
    "base_bytes": 10**8,
    "worker_bytes": 10**8,
    "codecs": [{"settings": {"kind": "bf16"}, "encode_s": 1e-5, "decode_s": 1e-5}],
    "no_codecs": "",
    "no_servers": "",
    "only_servers": "",
    "cores": 4,
    "memory_bytes": 8 * 10**9,
    "crowding": 1.0,
    "exchange_s": 2e-4,
    "add_bytes_s": 4e9,
    "latency_s": 1e-5,
    "socket_bytes_s": 1e9,
}
