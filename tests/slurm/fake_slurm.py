"""A real Slurm on this machine alone: slurmctld, slurmds on loopback addresses, and GPUs that are device files."""

import os
import re
import shutil
import socket
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")

_CONF = """\
ClusterName=fake
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=10
OverTimeLimit=1
GresTypes=gpu
PropagateResourceLimits=NONE
PartitionName=gpu Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.{address} Port={port} CPUs=64 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=64 ThreadsPerCore=1 RealMemory=100000 Gres=gpu:8\n"
)


def missing_part() -> str | None:
    """Why there can be no Slurm here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurmd slurmctld munge"
    return None if os.geteuid() == 0 else "only root can start slurmd"


class FakeSlurm:
    """`num_nodes` nodes n1, n2 ... at 127.0.0.2, 127.0.0.3 ..., each with 64 CPUs and 8 GPUs on paper.

    A context manager: on leaving, jobs are cancelled and every daemon has ended.
    """

    def __init__(self, folder: Path, num_nodes: int = 8):
        self.folder, self.num_nodes = folder, num_nodes
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = ExitStack()

    def __enter__(self) -> "FakeSlurm":
        self._write_files()
        with self._daemons:
            self._start_daemons()
            self._daemons = self._daemons.pop_all()
        return self

    def __exit__(self, *exc_info) -> None:
        self._daemons.close()

    def run(self, *command: str, **environment: str) -> str:
        """The output of a command of Slurm's. Raises CalledProcessError."""
        result = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=60, check=False
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr}")
        return result.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by name."""
        line = self.run("scontrol", "show", "job", "-o", job_id).splitlines()[0]
        return dict(re.findall(r"(\w+(?:[:/]\w+)?)=(\S*)", line))

    def _write_files(self) -> None:
        for name in ("munge", "state", "spool", "log"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        controller_port, *ports = _free_ports(self.num_nodes + 1)
        nodes = (_NODE.format(number=i + 1, host=host, address=i + 2, port=port) for i, port in enumerate(ports))
        conf = _CONF.format(folder=self.folder, host=host, controller_port=controller_port, nodes=self.num_nodes)
        head, partition = conf[: conf.index("PartitionName")], conf[conf.index("PartitionName") :]
        (self.folder / "slurm.conf").write_text(head + "".join(nodes) + partition)
        for number in range(8):
            os.mknod(self.folder / f"gpu{number}", 0o020666, os.makedev(1, 3))  # the null device
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")

    def _start_daemons(self) -> None:
        munge = self.folder / "munge"
        self._start(
            munge / "pid",
            *("munged", "--force", f"--socket={munge}/sock", f"--key-file={munge}/key", f"--pid-file={munge}/pid"),
            *(f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        self._start(self.folder / "slurmctld.pid", "slurmctld")
        for number in range(1, self.num_nodes + 1):
            self._start(self.folder / f"slurmd.n{number}.pid", "slurmd", "-N", f"n{number}")
        self._daemons.callback(self._cancel_jobs)
        wait_until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(self.num_nodes), 30)

    def _start(self, pid_file: Path, *command: str) -> None:
        subprocess.run(command, env=self.environment, check=True, timeout=30, stderr=subprocess.DEVNULL)
        wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), 10, f"{pid_file} is written")
        self._daemons.callback(_end, int(pid_file.read_text()))

    def _cancel_jobs(self) -> None:
        self.run("scancel", "--quiet", "--user=root")
        wait_until(lambda: not self.run("squeue", "-h").strip(), 60)


def wait_until(condition, timeout_s: float, what: str = ""):
    """Polls `condition` until it is true and returns its value. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.2)
    return value


def _end(pid: int) -> None:
    try:
        os.kill(pid, 15)
    except ProcessLookupError:
        return
    wait_until(lambda: not _is_alive(pid), 30, f"process {pid} ends")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(closing(socket.socket())) for _ in range(count)]
        for item in bound:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in bound]
