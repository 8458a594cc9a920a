"""The gates on compiled GPU kernels: they hold, against committed baselines, and they would catch what they are for."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.kernels import toolchain
from benchmarks.kernels.machines import MACHINES, Work, blocks_per_sm, model
from benchmarks.kernels.roofline import BASELINES, compare, gates
from benchmarks.kernels.sass import Loop, kernels_of
from benchmarks.kernels.toolchain import MissingTool

ROOT = Path(__file__).parents[2]
NEEDED = {"cuda": ("nvcc", "nvdisasm", "cuobjdump"), "triton": ("nvdisasm", "cuobjdump")}


def missing(backend: str) -> str | None:
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        for name in NEEDED[backend]:
            toolchain.tool(name)
    except MissingTool as error:
        return str(error)
    return None


@pytest.fixture
def baseline() -> dict:
    return json.loads((BASELINES / "nvcc-13.0.88.json").read_text())


@pytest.mark.parametrize("backend", NEEDED)
def test_compiled_kernels_pass(backend):
    """Compiles everything for Hopper and Blackwell; a process of its own, since Triton must not interpret here."""
    if reason := missing(backend):
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.kernels.roofline", "--backends", backend]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert "modelled, not measured" in done.stdout


def test_baselines_are_within_the_targets(baseline):
    assert gates(baseline) == []
    assert compare(baseline, baseline) == []


def test_a_spill_or_a_narrow_access_is_caught(baseline):
    name = "policy_rows bfloat16 sm_90a"
    baseline["kernels"][name] |= {"local_accesses": 2, "access_bits": [32, 128]}
    failures = gates(baseline)
    assert len(failures) == 2
    assert failures[0].startswith(f"{name}: spills (2 local accesses")
    assert "[32, 128] bits" in failures[1]


def test_a_missed_target_is_caught(baseline):
    baseline["times"]["single-read H200 bfloat16 T=8192 V=151936"]["ratio"] = 1.26
    assert gates(baseline) == ["single-read: modelled at 1.26 times its floor, the target is 1.25"]


def test_a_slower_kernel_is_caught(baseline):
    worse = copy.deepcopy(baseline)
    worse["kernels"]["row_records float32 sm_100a"]["instructions_per_element"] += 1
    del worse["times"]["three-pass B200 float32 T=1024 V=37984"]
    changes = compare(worse, baseline)
    assert len(changes) == 2
    assert changes[0].startswith("row_records float32 sm_100a: instructions_per_element was")
    assert changes[1] == "three-pass B200 float32 T=1024 V=37984: not in both of report and baseline"


SPILLING = """
__global__ void spills(const float* in, float* out, int n) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[i] = in[i * n + threadIdx.x];
  for (int i = 0; i < n; ++i) kept[(i * 7) % 64] += in[i];
  for (int i = 0; i < 64; ++i) out[i * n + threadIdx.x] = kept[i];
}
__global__ void narrow(const float* in, float* out, int n) {
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 32) out[i] = exp2f(in[i]);
}
"""


def test_machine_code_is_read_right(tmp_path):
    if reason := missing("cuda"):
        pytest.skip(reason)
    source = tmp_path / "bad.cu"
    source.write_text(SPILLING)
    toolchain.compile_cubin(source, "sm_90a", tmp_path / "bad.cubin")
    spills, narrow = (kernels_of(tmp_path / "bad.cubin")[name] for name in ("_Z6spillsPKfPfi", "_Z6narrowPKfPfi"))
    assert spills.local_accesses > 0
    assert spills.stack >= 256
    assert narrow.local_accesses == narrow.stack == 0
    (loop,) = (loop for loop in narrow.loops if loop.exponentials)
    assert loop.exponentials == 1
    assert loop.widths("LDG") == loop.widths("STG") == {32: 1}
    assert loop.bytes("LDG", "STG") == 8


def test_loops_count_what_they_access():
    loop = Loop(Counter({"LDG.E.NA.128": 4, "STG.E.64": 2, "LDS.U16": 3, "MUFU.EX2": 5, "FADD": 7}))
    assert loop.instructions == 21
    assert loop.exponentials == 5
    assert loop.widths("LDG", "STG") == {128: 4, 64: 2}
    assert loop.bytes("LDS") == 6


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks"),
    [
        (256, 80, 0, 3),
        (256, 32, 0, 8),
        (256, 80, 76_480, 3),
        (256, 40, 115_000, 2),
        (256, 40, 120_000, 1),
        (1024, 32, 0, 2),
        (32, 16, 0, 32),
    ],
)
def test_occupancy(threads, registers, shared, blocks):
    assert blocks_per_sm(threads, registers, shared) == blocks


def test_the_model_finds_the_bottleneck():
    h200 = next(machine for machine in MACHINES if machine.name == "H200")
    work = Work(13_200, 5, 4.3e9, 0.0, 0.0, 0.0, 1e-6)
    assert model(h200, work).bound == "memory"
    assert model(h200, work).seconds == pytest.approx(1e-3 * (1 + 0.5 / 20) + 3e-6)
    busy = Work(13_200, 5, 4.3e9, 2e-3 * h200.issue_rate, 0.0, 0.0, 1e-6)
    assert model(h200, busy).bound == "issue"
    assert model(h200, busy).shares["issue"] == pytest.approx(2)
