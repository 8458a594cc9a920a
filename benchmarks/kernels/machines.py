"""GPUs as the model sees them, and the time that it gives to a launch."""

import math
from dataclasses import dataclass

THREADS_PER_SM, REGISTERS_PER_SM, SHARED_PER_SM, SHARED_OF_SYSTEM = 2048, 65536, 228 * 1024, 1024
WARP = 32
# Assumptions of the model, each on the slow side.
LAUNCH_S = 3e-6
SERIAL_CYCLES = 8  # a float64 instruction that waits for the one before it
MERGE_CYCLES = 3000  # of a block: lanes, warps and blocks of a cluster come together
TURN_CYCLES = 2.0  # of a warp's instruction in a loop, on top of the wait for memory
ALONE_IPC = 2.0  # warp instructions a cycle of one block of 8 warps that has a multiprocessor for itself


@dataclass(frozen=True)
class Machine:
    """bandwidth: bytes/s of a large copy. arch_nvcc, arch_triton: whose machine code it runs."""

    name: str
    arch_nvcc: str
    arch_triton: str
    multiprocessors: int
    clock_hz: float
    bandwidth: float
    latency_s: float

    @property
    def issue_rate(self) -> float:
        """Warp instructions/s."""
        return 4 * self.multiprocessors * self.clock_hz

    @property
    def exponential_rate(self) -> float:
        """Warp instructions/s of MUFU.EX2: 16 lanes a cycle on a multiprocessor."""
        return self.multiprocessors * self.clock_hz * 16 / WARP

    @property
    def shared_rate(self) -> float:
        """Bytes/s of all shared memories."""
        return 128 * self.multiprocessors * self.clock_hz


# Copy bandwidths: about nine tenths of what the data sheets say; sustained clocks below the highest boost.
MACHINES = (
    Machine("H100", "sm_90a", "sm_90", 132, 1.755e9, 3.0e12, 0.8e-6),
    Machine("H200", "sm_90a", "sm_90", 132, 1.755e9, 4.3e12, 0.8e-6),
    Machine("B200", "sm_100a", "sm_100", 148, 1.85e9, 7.2e12, 0.9e-6),
)


@dataclass(frozen=True)
class Work:
    """A launch in numbers that a machine turns into seconds.

    blocks: of the launch; resident: of them on a multiprocessor at a time.
    hbm_bytes: to and from memory. instructions, exponentials: warp instructions of all blocks. shared_bytes: to and
    from shared memory. block_s: time of one block from its start to its end if nothing else ran, of which a machine
    can overlap `resident` ones.
    """

    blocks: int
    resident: int
    hbm_bytes: float
    instructions: float
    exponentials: float
    shared_bytes: float
    block_s: float


@dataclass(frozen=True)
class Time:
    """seconds, and which resource sets them; shares: what each resource alone would take, as a fraction of memory's."""

    seconds: float
    bound: str
    shares: dict[str, float]


def model(machine: Machine, work: Work) -> Time:
    """The slowest resource, plus the launch and half a turn of blocks in which the device runs empty at the end."""
    turns = work.blocks / (machine.multiprocessors * work.resident)
    alone = {
        "memory": work.hbm_bytes / machine.bandwidth,
        "issue": work.instructions / machine.issue_rate,
        "exponentials": work.exponentials / machine.exponential_rate,
        "shared": work.shared_bytes / machine.shared_rate,
        "latency": max(turns, 1.0) * work.block_s,
    }
    bound = max(alone, key=lambda name: alone[name])
    ending = 0.5 / turns if turns > 1 else 0.0
    seconds = alone[bound] * (1 + ending) + LAUNCH_S
    return Time(seconds, bound, {name: value / alone["memory"] for name, value in alone.items()})


def blocks_per_sm(threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that fit a multiprocessor of these GPUs at a time. shared_bytes: of a block, without the system's own."""
    per_warp = math.ceil(registers * WARP / 256) * 256
    by_registers = REGISTERS_PER_SM // (per_warp * (threads // WARP))
    by_shared = SHARED_PER_SM // (math.ceil(shared_bytes / 128) * 128 + SHARED_OF_SYSTEM)
    return min(THREADS_PER_SM // threads, by_registers, by_shared, 32)
