"""The folder of a run, and what this version runs. A config beyond it is planned by --dry-run and refused by a run."""

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("run_dir")
def run_has_a_folder(config: TrainConfig) -> str | None:
    """run_dir is not empty, as it is where a shell variable is unset."""
    return None if config.run_dir.strip() else "is empty: give the folder of the run, e.g. run_dir=runs/first"


@rule("num_devices", "cluster.mode", "rollout.engine", "sync.mode", run_only=True)
def one_process(config: TrainConfig) -> str | None:
    """This version runs in one process: num_devices=1, cluster.mode=inprocess, rollout.engine=native and
    sync.mode=inprocess.
    """
    runs = {"num_devices": 1, "cluster.mode": "inprocess", "rollout.engine": "native", "sync.mode": "inprocess"}
    asked = {
        "num_devices": config.num_devices,
        "cluster.mode": config.cluster.mode,
        "rollout.engine": config.rollout.engine,
        "sync.mode": config.sync.mode,
    }
    beyond = [name for name in runs if asked[name] != runs[name]]
    if not beyond:
        return None
    return (
        f"found {', '.join(f'{name}={asked[name]}' for name in beyond)}; this version runs in one process: "
        f"{', '.join(f'{name}={runs[name]}' for name in beyond)}; --dry-run plans more"
    )
