"""Config of losses and advantages: plain dataclasses, importable without torch."""

from dataclasses import dataclass

from unirl.utils.keys import key


@dataclass
class NormConfig:
    """How values of one kind (rewards, advantages), one per sample, are normalised."""

    mean_level: str | None = key(
        "batch", "Level of the mean that is subtracted; null: none.", choices=["batch", "group"]
    )
    std_level: str | None = key("batch", "Level of the std that divides; null: none.", choices=["batch", "group"])
    mean_leave1out: bool = key(False, "Leave the value itself out of its mean (RLOO).")
    std_unbiased: bool = key(True, "Divide the variance by n - 1.")
    eps: float = key(1e-5, "Added to the std.", gt=0)
    group_size: int | None = key(None, "Group size where values carry no group ids.", ge=1)


@dataclass
class PolicyLossConfig:
    """Which policy loss, and its constants."""

    loss: str = key(
        "drpo", "Loss on the ratio of policy to anchor.", choices=["ppo", "drpo", "spo", "dppo", "sapo", "cispo"]
    )
