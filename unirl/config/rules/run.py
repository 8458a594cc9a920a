"""The folder of a run, and what this version runs. A config beyond it is planned by --dry-run and refused by a run."""

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("run_dir")
def run_has_a_folder(config: TrainConfig) -> str | None:
    """run_dir is not empty, as it is where a shell variable is unset."""
    return None if config.run_dir.strip() else "is empty: give the folder of the run, e.g. run_dir=runs/first"


@rule("num_devices", "cluster.mode", "sync.mode", run_only=True)
def one_process(config: TrainConfig) -> str | None:
    """This version trains in one process: num_devices=1, cluster.mode=inprocess, sync.mode=inprocess or disk."""
    runs = {"num_devices": [1], "cluster.mode": ["inprocess"], "sync.mode": ["inprocess", "disk"]}
    asked = {
        "num_devices": config.num_devices,
        "cluster.mode": config.cluster.mode,
        "sync.mode": config.sync.mode,
    }
    beyond = [name for name in runs if asked[name] not in runs[name]]
    if not beyond:
        return None
    return (
        f"found {', '.join(f'{name}={asked[name]}' for name in beyond)}; this version trains in one process: "
        f"{', '.join(f'{name}={runs[name][-1]}' for name in beyond)}; --dry-run plans more"
    )
