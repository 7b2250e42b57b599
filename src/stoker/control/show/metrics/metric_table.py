"""Lists every metric that `stoker metrics` exports: name, kind, labels, meaning. docs/metrics.md is generated from it.

Units are base units. Names of counters end in `_total`, names of metadata in `_info`. No label holds a step or a pid, so a
label set stays the same as long as its run, host or GPU exists.
"""

from __future__ import annotations

from stoker.contract.frozen import frozen

GAUGE, COUNTER = "gauge", "counter"

# ---- label sets ----
HOST = ("host",)
GPU = ("host", "gpu", "uuid")
RUN = ("run",)
RANK = ("run", "rank")
SERVER = ("run", "role")
CLASSIC = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION")
NEW = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "hostname", "DCGM_FI_SYSTEM_DRIVER_VERSION")


@frozen
class MetricSpec:
    """A metric of the table."""

    name: str
    labels: tuple[str, ...]
    text: str
    kind: str = GAUGE

    @property
    def unit(self) -> str:
        """The unit, from the suffix of the name."""
        name = self.name.removesuffix("_total")
        units = {
            "_timestamp_seconds": "seconds since 1970",
            "_bytes_per_second": "bytes per second",
            "_tokens_per_second": "tokens per second",
            "_requests_per_second": "requests per second",
            "_seconds": "seconds",
            "_bytes": "bytes",
            "_ratio": "0 to 1",
            "_celsius": "°C",
            "_watts": "watts",
            "_hertz": "hertz",
            "_joules": "joules",
            "_info": "always 1",
            "_mb": "MiB",
            "_percent": "0 to 100",
        }
        return next((unit for end, unit in units.items() if name.lower().endswith(end)), "")


def _make_specs(labels: tuple[str, ...], *texts: tuple[str, str]) -> list[MetricSpec]:
    return [
        MetricSpec(name, labels, text, COUNTER if name.lower().endswith("_total") else GAUGE) for name, text in texts
    ]


GROUPS: dict[str, list[MetricSpec]] = {
    "The exporter": [
        *_make_specs(
            (),
            ("stoker_last_collect_success", "1: the last collection succeeded; 0: it failed and older values are served"),
            ("stoker_last_collect_timestamp_seconds", "When the served values were collected"),
            ("stoker_last_collect_duration_seconds", "Duration of the last collection"),
            ("stoker_run_folders_left_out", "Folders of other users in the runs folder that were skipped"),
        ),
        MetricSpec("stoker_build_info", ("version",), "Version of Stoker"),
        MetricSpec("stoker_runs", ("state",), "Runs in the runs folder, by state"),
    ],
    "Training": [
        *_make_specs(
            RUN,
            ("stoker_training_loss", "Newest training loss; may be NaN or infinite"),
            ("stoker_training_step", "Steps made"),
            ("stoker_training_planned_steps", "Steps planned"),
            ("stoker_training_tokens_total", "Tokens trained on since the start of the run"),
            ("stoker_training_tokens_per_second", "Tokens trained on per second, over the last steps"),
            ("stoker_training_step_seconds", "Seconds per step, over the last steps"),
            ("stoker_training_mfu_ratio", "Model FLOPs utilization: achieved ÷ peak FLOP/s"),
            ("stoker_training_gradient_norm", "Gradient norm, before clipping"),
            ("stoker_training_learning_rate", "Learning rate"),
            ("stoker_training_eta_seconds", "Estimated time to the end of the run"),
        ),
        MetricSpec("stoker_training_metric", ("run", "metric"), "Newest value of every other metric that the run writes"),
    ],
    "Servers": [
        *_make_specs(
            SERVER,
            ("stoker_server_requests_total", "Completions finished by all replicas; rate() gives completions per second"),
            ("stoker_server_generated_tokens_total", "Tokens generated"),
            ("stoker_server_prompt_tokens_total", "Prompt tokens, computed or cached"),
            ("stoker_server_requests_per_second", "Completions finished per second, over the last half minute"),
            ("stoker_server_tokens_per_second", "Tokens generated per second, over the last half minute"),
            ("stoker_server_running", "Requests being processed"),
            ("stoker_server_waiting", "Requests waiting for a slot"),
            ("stoker_server_weights_version", "Version of the weights; the oldest of several replicas"),
        ),
    ],
    "Runs and their launcher": [
        MetricSpec("stoker_run_info", ("run", "name", "user"), "A run that is running, or ended in the last 15 minutes"),
        MetricSpec("stoker_run_state", ("run", "state"), "1 for the state the run is in, 0 for the others"),
        *_make_specs(
            RUN,
            ("stoker_run_started_timestamp_seconds", "When the run was started"),
            ("stoker_run_updated_timestamp_seconds", "Time of its newest event or metrics line"),
            ("stoker_run_ranks", "Ranks planned"),
            ("stoker_run_attempts", "Attempts started; 1 without a restart"),
            ("stoker_run_exit_code", "Exit code of a run that ended"),
        ),
        MetricSpec("stoker_run_restarts_total", ("run", "cause"), "Restarts, by the cause of the failure", COUNTER),
        MetricSpec("stoker_run_verdict_info", ("run", "status", "cause"), "Status and cause of the verdict of a run that ended"),
        MetricSpec("stoker_run_suspicion_info", ("run", "kind", "cause"), "Current suspicion of the watch"),
        MetricSpec("stoker_run_suspicion_timestamp_seconds", ("run", "kind", "cause"), "When the suspicion was reported"),
    ],
    "Ranks": [
        MetricSpec("stoker_rank_info", (*RANK, "role", "host", "gpu", "uuid"), "Where a rank runs"),
        MetricSpec("stoker_rank_phase_info", (*RANK, "phase"), "Phase that the rank announced with stoker.phase, else train"),
        *_make_specs(
            RANK,
            ("stoker_rank_up", "1: its process is running; 0: it is waiting, stopped, ended or gone"),
            ("stoker_rank_step", "Steps made"),
            ("stoker_rank_step_seconds", "Seconds per step"),
            ("stoker_rank_waiting_ratio", "Share of its time spent waiting for other ranks in collectives"),
            ("stoker_rank_collective_age_seconds", "Time since it entered its current collective"),
            ("stoker_rank_beat_age_seconds", "Time since its last sign of progress"),
            ("stoker_rank_memory_bytes", "Resident memory, including child processes"),
        ),
        MetricSpec("stoker_rank_slow_wait_seconds", (*RANK, "cause"), "Time per step that the other ranks wait for a slow rank"),
    ],
    "Doctor": [
        MetricSpec("stoker_doctor_findings", ("host", "check", "level"), "Findings of the fast checks of `stoker doctor`"),
        MetricSpec("stoker_doctor_check_timestamp_seconds", HOST, "When the checks ran; every 5 minutes"),
    ],
    "Hosts": [
        MetricSpec("stoker_host_info", ("host", "driver"), "NVIDIA driver version of the host"),
        *_make_specs(
            HOST,
            ("stoker_host_up", "1: the host responds; 0: it is OFFLINE"),
            ("stoker_host_gpus", "GPUs that respond"),
            ("stoker_host_gpu_driver_failed", "1: a driver is installed and does not respond"),
            ("stoker_host_cpu_cores", "CPU cores that this process may use"),
            ("stoker_host_cpu_busy_ratio", "CPU utilization over all cores"),
            ("stoker_host_memory_size_bytes", "Memory of the host, or the container's limit if that is lower"),
            ("stoker_host_memory_available_bytes", "Memory available without swapping"),
            ("stoker_host_swap_used_bytes", "Swap in use"),
            ("stoker_host_disk_read_bytes_per_second", "Read from all disks"),
            ("stoker_host_disk_written_bytes_per_second", "Written to all disks"),
            ("stoker_host_network_receive_bytes_per_second", "Received on all interfaces except loopback"),
            ("stoker_host_network_transmit_bytes_per_second", "Sent on all interfaces except loopback"),
            ("stoker_host_network_link_bytes_per_second", "Speed of the fastest interface"),
        ),
        MetricSpec("stoker_host_load", ("host", "minutes"), "Load average over 1, 5 and 15 minutes"),
        MetricSpec("stoker_host_disk_free_bytes", ("host", "path"), "Free space on the file system of the runs"),
        MetricSpec("stoker_host_disk_size_bytes", ("host", "path"), "Size of the file system of the runs"),
        MetricSpec("stoker_host_pressure_ratio", ("host", "resource"),
                  "Share of the last 10 s in which some process waited for cpu, io or memory"),
    ],
    "GPUs": [
        MetricSpec("stoker_gpu_info", (*GPU, "name", "pci_bus_id"), "A GPU"),
        *_make_specs(
            GPU,
            ("stoker_gpu_up", "1: NVML can read the GPU; 0: it can't"),
            ("stoker_gpu_utilization_ratio", "Share of the time in which a kernel was running"),
            ("stoker_gpu_memory_used_bytes", "Memory in use"),
            ("stoker_gpu_memory_size_bytes", "Memory"),
            ("stoker_gpu_temperature_celsius", "Temperature"),
            ("stoker_gpu_temperature_slowdown_celsius", "Temperature at which the driver begins to lower the clock"),
            ("stoker_gpu_power_watts", "Power drawn"),
            ("stoker_gpu_power_limit_watts", "Power limit"),
            ("stoker_gpu_clock_hertz", "Clock of the multiprocessors"),
            ("stoker_gpu_clock_max_hertz", "Maximum clock of the multiprocessors"),
            ("stoker_gpu_memory_clock_hertz", "Memory clock"),
            ("stoker_gpu_pcie_lanes", "PCIe lanes in use"),
            ("stoker_gpu_pcie_max_lanes", "PCIe lanes available"),
            ("stoker_gpu_energy_joules_total", "Energy used since the driver was loaded"),
            ("stoker_gpu_processes", "Processes on the GPU"),
            ("stoker_gpu_last_xid", "Number of the last Xid error; 0: none"),
        ),
        MetricSpec("stoker_gpu_throttled", (*GPU, "reason"), "1: this reason lowers the clock now; 0: it does not"),
        MetricSpec("stoker_gpu_ecc_errors_total", (*GPU, "kind"), "Memory errors since the driver was loaded", COUNTER),
        MetricSpec("stoker_gpu_xid_timestamp_seconds", (*GPU, "xid"),
                  "When this Xid was last seen; 0: before the exporter was started"),
    ],
    "Short names": [
        MetricSpec("gpu_memory_used_mb", ("node", "gpu"), "stoker_gpu_memory_used_bytes, as nvidia-smi shows it"),
        MetricSpec("gpu_utilization_percent", ("node", "gpu"), "stoker_gpu_utilization_ratio × 100"),
        MetricSpec("training_loss", ("rank", "run"), "The rank's own loss where it reports one, else the run's for rank 0"),
    ],
    "DCGM's classic names (`--dcgm classic`, the default)": [
        MetricSpec("DCGM_FI_DEV_GPU_UTIL", CLASSIC, "GPU utilization (in %)."),
        MetricSpec("DCGM_FI_DEV_FB_USED", CLASSIC, "Framebuffer memory used (in MiB)."),
        MetricSpec("DCGM_FI_DEV_FB_FREE", CLASSIC, "Framebuffer memory free (in MiB)."),
        MetricSpec("DCGM_FI_DEV_GPU_TEMP", CLASSIC, "GPU temperature (in C)."),
        MetricSpec("DCGM_FI_DEV_POWER_USAGE", CLASSIC, "Power draw (in W)."),
        MetricSpec("DCGM_FI_DEV_SM_CLOCK", CLASSIC, "SM clock frequency (in MHz)."),
        MetricSpec("DCGM_FI_DEV_MEM_CLOCK", CLASSIC, "Memory clock frequency (in MHz)."),
        MetricSpec("DCGM_FI_DEV_XID_ERRORS", CLASSIC, "Value of the last XID error encountered."),
        MetricSpec("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", CLASSIC, "Total energy consumption since boot (in mJ).", COUNTER),
    ],
    "DCGM's names from 4.9 on (`--dcgm 4.9`)": [
        MetricSpec("DCGM_FI_DEV_GPU_UTIL_RATIO", NEW, "GPU utilization."),
        MetricSpec("DCGM_FI_DEV_FB_USED_BYTES", NEW, "Framebuffer memory used."),
        MetricSpec("DCGM_FI_DEV_FB_FREE_BYTES", NEW, "Framebuffer memory free."),
        MetricSpec("DCGM_FI_DEV_FB_CAPACITY_BYTES", NEW, "Framebuffer memory."),
        MetricSpec("DCGM_FI_DEV_GPU_TEMP_CELSIUS", NEW, "GPU temperature."),
        MetricSpec("DCGM_FI_DEV_BOARD_POWER_WATTS", NEW, "Power draw."),
        MetricSpec("DCGM_FI_DEV_SM_CLOCK_HERTZ", NEW, "SM clock frequency."),
        MetricSpec("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", NEW, "Memory clock frequency."),
        MetricSpec("DCGM_FI_DEV_XID_ERROR", NEW, "Value of the last XID error encountered."),
        MetricSpec("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", NEW, "Total energy consumption since the driver was loaded.", COUNTER),
    ],
}  # fmt: skip

ALL = {row.name: row for rows in GROUPS.values() for row in rows}
