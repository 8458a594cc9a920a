"""What is run for a valid config: the training command itself, or the submission of a job script."""

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import unirl
from unirl.config.geometry import Geometry
from unirl.config.schema import TrainConfig
from unirl.errors import UserError
from unirl.launch.command import Launch


@dataclass(frozen=True)
class Plan:
    """A command, what it finds in its environment beside ours, and the script that it submits, if any."""

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    script: Path | None = None

    def shell_line(self) -> str:
        """The command as it can be typed."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])

    def text(self) -> str:
        """The shell line, and the script in full."""
        if self.script is None:
            return self.shell_line()
        beside = ", ".join(str(self.script.with_name(name)) for name in ("ray_cluster.sh", "ray_node.sh"))
        return f"{self.shell_line()}\n\n# {self.script} (with {beside}):\n\n{self.script.read_text()}"


def make_plan(launch: Launch, config: TrainConfig) -> Plan:
    """Raises UserError where the config does not fit the job script that was asked for."""
    return _local(launch) if launch.place == "local" else _slurm(launch, config)


def _local(launch: Launch) -> Plan:
    training = launch.training
    folders = (f"--config-dir={folder}" for folder in training.config_dirs)
    options = (f"--config-name={training.config_name}", *folders, *training.overrides)
    return Plan((sys.executable, "-m", "unirl.train_ar", *options))


def _slurm(launch: Launch, config: TrainConfig) -> Plan:
    root = _checkout()
    template = launch.template or _template_of(config)
    script = root / "examples" / "slurm" / f"{template}.sbatch"
    sizes, environment = _sizes(template, config), {"UNIRL_ROOT": str(root), "UNIRL_PYTHON": sys.executable}
    if template == "train_ar_separate_rollout":
        environment["UNIRL_ROLLOUT_NODES"] = str(_rollout_nodes(config))
    components = [[*size, *launch.sbatch_options] for size in sizes]
    options = components[0] + [word for component in components[1:] for word in (":", *component)]
    folders = (f"--config-dir={Path(folder).resolve()}" for folder in launch.training.config_dirs)
    recipe = (launch.training.config_name, *folders, *launch.training.overrides)
    return Plan(("sbatch", *options, str(script), *recipe), environment, script)


def _template_of(config: TrainConfig) -> str:
    if config.cluster.layout == "split":
        return "train_ar_separate_rollout"
    return "train_ar" if Geometry.of(config).nodes > 1 else "train_ar_single_node"


def _sizes(template: str, config: TrainConfig) -> list[list[str]]:
    """The nodes and GPUs of each component of the job, as options of sbatch."""
    nodes, per_node = Geometry.of(config).nodes, min(config.num_devices, config.devices_per_node)
    if template == "train_ar_single_node" and nodes > 1:
        raise UserError(f"--template={template}: num_devices={config.num_devices} needs {nodes} nodes; use train_ar")
    counts = [nodes]
    if template == "train_ar_heterogeneous":
        counts = [nodes - _rollout_nodes(config), _rollout_nodes(config)]
    return [[f"--nodes={count}", f"--gpus-per-node={per_node}"] for count in counts]


def _rollout_nodes(config: TrainConfig) -> int:
    sampling, per_node = config.rollout.num_devices, config.devices_per_node
    if config.cluster.layout != "split" or sampling is None or sampling % per_node:
        raise UserError(
            "a job script with rollout nodes of their own needs cluster.layout=split and rollout.num_devices in whole "
            f"nodes of devices_per_node={per_node}; found {config.cluster.layout} and {sampling}"
        )
    return sampling // per_node


def _checkout() -> Path:
    """The folder that holds examples/slurm: of the source checkout, or of the installed package."""
    package = Path(unirl.__file__).parent
    for folder in (package.parent, package):
        if (folder / "examples" / "slurm" / "ray_cluster.sh").is_file():
            return folder
    raise UserError(f"no examples/slurm beside {package}: install unirl anew, or run from a checkout")


def merged_environment(plan: Plan) -> dict[str, str]:
    """The environment of this process with the plan's settings."""
    return {**os.environ, **plan.environment}
