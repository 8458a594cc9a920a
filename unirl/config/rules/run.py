"""What this version runs. A config beyond it is planned by --dry-run and refused by a run."""

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("num_devices", "cluster.mode", run_only=True)
def one_process(config: TrainConfig) -> str | None:
    """This version runs in one process: num_devices=1 and cluster.mode=inprocess."""
    if config.num_devices == 1:
        return None
    return (
        f"this version runs on one device, in one process; use num_devices=1, or plan {config.num_devices} devices "
        "with --dry-run"
    )


@rule("cluster.mode", run_only=True)
def no_cluster(config: TrainConfig) -> str | None:
    """This version runs cluster.mode=inprocess."""
    return None if config.cluster.mode == "inprocess" else _this_version("cluster.mode", "inprocess", config.cluster.mode)


@rule("rollout.engine", run_only=True)
def native_engine(config: TrainConfig) -> str | None:
    """This version runs rollout.engine=native."""
    return None if config.rollout.engine == "native" else _this_version("rollout.engine", "native", config.rollout.engine)


@rule("sync.mode", run_only=True)
def weights_in_process(config: TrainConfig) -> str | None:
    """This version runs sync.mode=inprocess."""
    return None if config.sync.mode == "inprocess" else _this_version("sync.mode", "inprocess", config.sync.mode)


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


def _this_version(key: str, runs: str, found: str) -> str:
    return f"found {found}; this version runs {key}={runs}, and plans the rest with --dry-run"
