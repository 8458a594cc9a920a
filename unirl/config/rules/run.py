"""What this version runs. A config beyond it is planned by --dry-run and refused by a run."""

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


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


@rule("algorithm", run_only=True)
def built_terms(config: TrainConfig) -> str | None:
    """This version trains without KL terms, reward_norm and use_decoupled_loss."""
    algorithm = config.algorithm
    asked = {
        "kl_ctl": algorithm.kl_ctl > 0,
        "kl_coef": algorithm.kl_coef > 0,
        "reward_norm": algorithm.reward_norm is not None,
        "use_decoupled_loss": algorithm.use_decoupled_loss,
    }
    names = [name for name, given in asked.items() if given]
    return f"this version does not train with {', '.join(names)}; leave them at their defaults" if names else None
