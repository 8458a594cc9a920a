"""One Slurm for all tests of this folder, and jobs that run the real tiny recipe on it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.slurm.fake_slurm import FakeSlurm, wait_until
from unirl.demo.arith import make_base_model

ROOT = Path(__file__).parents[2]
RECIPE = "ar/arith_drpo_tiny_cpu"

ENDED = {"CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
"""States that a job does not leave by itself; it passes through others, as SIGNALING, while it lives."""

_ASK_RAY = """\
import json, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(json.dumps(ray.nodes()))
"""


@dataclass
class Jobs:
    """Submits the templates and looks at what becomes of them."""

    slurm: FakeSlurm
    folder: Path
    model: Path
    submitted: list[str] = field(default_factory=list)

    def submit(
        self,
        template: str,
        *overrides: str,
        recipe: str = RECIPE,
        ranks: int = 1,
        servers: int = 0,
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> "Job":
        """The job of `sbatch OPTIONS examples/slurm/TEMPLATE.sbatch RECIPE OVERRIDES`, called in the checkout.

        ranks, servers: processes that train, and SGLang servers beside them, one on each node of its kind; without
        servers, the native engine samples.
        """
        run_dir = self._next_run_dir()
        # The GPUs exist on paper only, so few of them are used.
        size = [f"num_devices={ranks + servers}", "devices_per_node=1"]
        if servers:
            size += [f"rollout.num_devices={servers}", "rollout.max_concurrency=32", "rollout.max_total_tokens=4096"]
        else:
            size += ["cluster.layout=colocate", "rollout.num_devices=null"]
        environment = {"UNIRL_PYTHON": sys.executable, "UNIRL_ROOT": str(ROOT)} | environment
        return self._start(
            run_dir,
            *("sbatch", f"--output={self.folder}/%j.out", f"--chdir={ROOT}", *options),
            *(str(ROOT / "examples" / "slurm" / f"{template}.sbatch"), recipe, *size, *self._tiny(run_dir), *overrides),
            **environment,
        )

    def launch(self, *overrides: str) -> "Job":
        """The job of `python -m unirl.launch slurm` with the recipe and the overrides."""
        run_dir = self._next_run_dir()
        return self._start(
            run_dir,
            *(sys.executable, "-m", "unirl.launch", "slurm", f"--config-name={RECIPE}", *self._tiny(run_dir)),
            *(f"--output={self.folder}/%j.out", *overrides),
        )

    def _next_run_dir(self) -> Path:
        return self.folder / f"run{len(self.submitted)}"

    def _tiny(self, run_dir: Path) -> list[str]:
        model = [f"model.path={self.model}", "model.maker=null"]
        return [*model, "batch_size=4", "data.heldout_size=8", f"run_dir={run_dir}"]

    def _start(self, run_dir: Path, *command: str, **environment: str) -> "Job":
        environment = {
            "UNIRL_JOBS": str(self.folder),
            # Eight raylets share this machine: small stores, and no workers that wait for work.
            "UNIRL_RAY_OPTIONS": "--object-store-memory=80000000 --include-log-monitor=false",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
        } | environment
        [job_id] = re.findall(r"Submitted batch job (\d+)", self.slurm.run(*command, **environment))
        self.submitted.append(job_id)
        return Job(job_id, self, run_dir)


@dataclass
class Job:
    id: str
    jobs: Jobs
    run_dir: Path

    @property
    def folder(self) -> Path:
        return self.jobs.folder / self.id

    @property
    def output(self) -> str:
        path = self.jobs.folder / f"{self.id}.out"
        return path.read_text() if path.exists() else ""

    @property
    def iterations(self) -> list[int]:
        """Those whose metrics are written."""
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line)["iteration"] for line in path.read_text().splitlines()] if path.exists() else []

    def state(self) -> str:
        return self.jobs.slurm.job(self.id)["JobState"]

    def wait(self, timeout_s: float = 240) -> dict[str, str]:
        """What Slurm says of the job when nothing of it runs any more."""
        wait_until(lambda: self.state() in ENDED, timeout_s, f"job {self.id} ends; its output:\n{self.output}")
        return self.jobs.slurm.job(self.id)

    def wait_for_ray(self, num_nodes: int, timeout_s: float = 240) -> list[dict]:
        """The nodes of the job's Ray cluster once there are `num_nodes`, by their address."""

        def nodes():
            self.check_is_alive()
            joined = [path for path in self.folder.glob("*.log") if "Ray runtime started" in path.read_text()]
            return len(joined) == num_nodes

        wait_until(nodes, timeout_s, f"{num_nodes} nodes join the Ray cluster of job {self.id}")
        result = ask_ray((self.folder / "address").read_text().strip(), self.folder / "token")
        assert result.returncode == 0, result.stderr
        return sorted(json.loads(result.stdout.splitlines()[-1]), key=lambda node: node["NodeManagerAddress"])

    def wait_for_training(self, timeout_s: float = 240) -> None:
        wait_until(lambda: self.check_is_alive() or len(self.iterations) > 2, timeout_s, f"job {self.id} trains")

    def has_said(self, text: str) -> bool:
        """Whether the text is in the job's output, of a job that lives."""
        return text in self.output or bool(self.check_is_alive())

    def check_is_alive(self) -> None:
        assert self.state() not in ENDED, self.output

    def processes(self) -> list[str]:
        """Command lines of what still runs of the job: steps, Ray's processes, the driver."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                files = [os.readlink(link) for link in (path / "fd").iterdir()]
            except OSError:  # it has ended meanwhile
                continue
            ray_files = any(name.startswith(f"/tmp/unirl-{self.id}-") for name in files)
            if ray_files or f"[{self.id}." in line or str(self.run_dir) in line:
                found.append(line)
        return found

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not self.processes(), 30, f"processes of job {self.id} end: {self.processes()}")
        assert list(Path("/tmp").glob(f"unirl-{self.id}-*")) == []
        assert not (self.folder / "token").exists()


def ask_ray(address: str, token: Path) -> subprocess.CompletedProcess:
    """`ray.nodes()` of the cluster at an address, as JSON on the last line."""
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return subprocess.run(
        [sys.executable, "-c", _ASK_RAY, address], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    model = folder / "model"
    make_base_model(str(model), careful_steps=3, lazy_steps=2)
    with FakeSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield Jobs(slurm, folder, model)
