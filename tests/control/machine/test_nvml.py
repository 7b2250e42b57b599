"""NVML through the real nvidia-ml-py, against a small library compiled here: most questions unsupported, one card, one Xid event."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conftest import Stoker

SOURCE = r"""
#include <stdio.h>
#include <string.h>
#include <stdint.h>
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
static int card, sent;
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { if (i == 1) return 15; *h = &card; return 0; }   /* 15: GPU is lost */
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) { strncpy(b, "GPU-fake-0", n); return 0; }
int nvmlDeviceGetName(void *h, char *b, unsigned n) { strncpy(b, "Half a Card", n); return 0; }
int nvmlDeviceGetMemoryInfo(void *h, memory_t *m) { m->total = 8000000000ull; m->used = 100000000ull; m->free = m->total - m->used; return 0; }
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2_t *m) { m->total = 8000000000ull; m->reserved = 60000000ull; m->used = 40000000ull; m->free = 7900000000ull; return 0; }
int nvmlDeviceGetTemperature(void *h, int s, unsigned *t) { return 3; }                                    /* 3: not supported */
static unsigned told(const char *name) { FILE *f = fopen(name, "r"); unsigned v = 0; if (!f) return 0; if (fscanf(f, "%u", &v) != 1) v = 0; fclose(f); return v; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { return (*mw = told("power")) ? 0 : 3; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *mw) { *mw = 700000; return told("power") ? 0 : 3; }
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *r) { *r = told("reasons"); return told("power") ? 0 : 3; }
int nvmlEventSetCreate(void **s) { *s = &sent; return 0; }
int nvmlDeviceRegisterEvents(void *h, unsigned long long t, void *s) { return 0; }
int nvmlEventSetWait_v2(void *s, event_t *e, unsigned ms) { if (sent++) return 10; memset(e, 0, sizeof *e); e->device = &card; e->type = 8; e->data = 79; return 0; }
int nvmlEventSetFree(void *s) { return 0; }
"""


@pytest.fixture
def half_a_card(stoker: Stoker) -> Stoker:
    (stoker.cwd / "fake.c").write_text(SOURCE)
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "fake.c"],
        cwd=stoker.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.skip(f"no C compiler: {built.stderr.strip()[:100]}")
    stoker.env.pop("STOKER_MACHINE")
    stoker.env["LD_LIBRARY_PATH"] = str(stoker.cwd)
    return stoker


def test_unsupported_fields_are_none_and_a_lost_card_is_named(half_a_card: Stoker) -> None:
    done = half_a_card("doctor", "--json", "--only", "gpu.")
    told = json.loads(done.out)
    first, second = told["examination"]["machine"]["gpus"]
    assert (first["name"], first["memory_total"], first["utilization"], first["compute_mode"], first["holders"]) == (
        "Half a Card",
        8 * 10**9,
        None,
        None,
        None,
    )
    assert "Lost" in second["error"] or "lost" in second["error"]
    health = told["examination"]["health"]["GPU-fake-0"]
    assert (
        health["temperature"] is None
        and health["throttle"] is None
        and health["nvlinks"] is None
        and health["xids"] == [79]
    )
    said = {(finding["id"], finding["gpu"]) for finding in told["findings"]}
    assert {("gpu.driver", 1), ("gpu.xid", 0)} <= said and done.code == 2
    assert told["examination"]["probes"]["GPU-fake-0"]["outcome"] == "absent"  # there is no libcuda beside it


def test_a_run_uses_the_half_card_and_leaves_the_lost_one_out(half_a_card: Stoker) -> None:
    script = half_a_card.script(
        "ok.py", "import os; print('ran on', os.environ['GPU_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    done = half_a_card("run", script)
    assert done.code == 0 and done.out == "ran on 0 GPU-fake-0\n", done.err
    assert "Found 2 GPU(s), using 1 GPUs: GPU 0; left out: GPU 1 is not responding" in done.err


def test_memory_that_the_driver_keeps_is_not_shown_as_used(half_a_card: Stoker) -> None:
    """As in nvidia-smi. A plan counts with what is free, and has it as used."""
    shown = json.loads(half_a_card("top", "--json").out)["gpus"][0]
    planned = json.loads(half_a_card("doctor", "--json", "--only", "gpu.").out)["examination"]["machine"]["gpus"][0]
    assert (shown["memory_used"], planned["memory_used"]) == (40_000_000, 100_000_000)


LOOKS = """
import json, sys, time
from stoker.control.machine.nvml import Nvml
nvml = Nvml()
shown = []
for power, reasons in json.loads(sys.argv[1]):
    open("power", "w").write(str(power * 1000))
    open("reasons", "w").write(str(reasons))
    shown.append(list(nvml.read_gauges()[0].throttle))
    time.sleep(0.3)
print(json.dumps([shown, nvml.read_work(["GPU-fake-0"])["GPU-fake-0"]["throttle"]]))
"""
CAP, HOT = 0x4, 0x20


@pytest.mark.parametrize(
    ("looks", "shown", "alone"),
    [
        ([(374, CAP)] * 3, [[], [], []], []),  # the reason alone, at half of the limit
        ([(695, CAP)] * 3, [[], ["power cap"], ["power cap"]], ["power cap"]),
        ([(695, CAP), (695, 0), (695, CAP)], [[], [], []], ["power cap"]),  # it comes and goes; `work` looks twice
        ([(374, CAP | HOT)], [["software thermal slowdown"]], ["software thermal slowdown"]),
    ],
    ids=["half", "capped", "flicker", "hot"],
)
def test_a_power_cap_is_shown_if_the_card_draws_its_limit_and_the_reason_lasts(
    half_a_card: Stoker, looks: list[tuple[int, int]], shown: list[list[str]], alone: list[str]
) -> None:
    script = half_a_card.script("looks.py", LOOKS)
    done = subprocess.run(
        [sys.executable, script, json.dumps(looks)],
        cwd=half_a_card.cwd,
        env=half_a_card.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [shown, alone]
