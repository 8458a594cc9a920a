"""Packed random batches, and one config for each kind of loss."""

from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies as st

LOSSES = {
    "ppo": {"loss": "ppo", "eps_clip": 0.2},
    "ppo_asymmetric": {"loss": "ppo", "eps_clip": 0.2, "eps_clip_higher": 0.28},
    "ppo_dual_clip": {"loss": "ppo", "eps_clip": 0.2, "c_clip": 1.5},
    "gspo": {"loss": "ppo", "eps_clip": 0.05, "importance_sampling_level": "sequence"},
    "drpo": {"loss": "drpo", "drpo_epsilon": 0.2},
    "drpo_sequence": {"loss": "drpo", "drpo_epsilon": 0.2, "importance_sampling_level": "sequence"},
    "spo": {"loss": "spo", "spo_epsilon": 0.2},
    "dppo": {"loss": "dppo", "dppo_delta": 0.05},
    "sapo": {"loss": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    "cispo": {"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 0.5},
    "decoupled": {"loss": "ppo", "use_decoupled_loss": True},
    "icepop": {
        "loss": "ppo",
        "use_decoupled_loss": True,
        "rejection_sampling": {"metric": "ratio", "lower": 0.8, "upper": 1.2},
    },
    "recompute": {"loss": "drpo", "drpo_epsilon": 0.2, "old_logp_source": "recompute"},
    "truncated_weights": {
        "loss": "drpo",
        "use_decoupled_loss": True,
        "rejection_sampling": {"metric": "ratio", "action": "clamp", "level": "sequence", "upper": 1.1},
    },
    "kpop_sequence": {
        "loss": "ppo",
        "use_decoupled_loss": True,
        "importance_sampling_level": "sequence",
        "rejection_sampling": {"metric": "binary_kl", "level": "sequence", "agg": "max", "upper": 0.02},
    },
    "extra_terms": {"loss": "drpo", "kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.01},
    "extra_terms_k2": {"loss": "ppo", "kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01},
}
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CONFIGS = {
    f"{name}/{mode}": {**loss, "loss_agg_mode": mode, "horizon": 16} for name, loss in LOSSES.items() for mode in MODES
}


@dataclass(frozen=True)
class Batch:
    """Inputs of `policy_loss`: tensors [T], and the lengths of the sequences."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    prox_logp: torch.Tensor
    ref_logp: torch.Tensor
    entropy: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    lengths: tuple[int, ...]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of `policy_loss`; logp and entropy are leaves that take a gradient."""
        leaves = {name: getattr(self, name).clone().requires_grad_() for name in ("logp", "entropy")}
        constants = {name: getattr(self, name) for name in tensor_names() if name not in leaves}
        return {**leaves, **constants, "cu_seqlens": self.cu_seqlens}

    def positions(self, sequence: int) -> torch.Tensor:
        """Positions of the tokens of a sequence."""
        start = sum(self.lengths[:sequence])
        return torch.arange(start, start + self.lengths[sequence])

    def select(self, sequences: list[int]) -> "Batch":
        """The sequences, in the order given."""
        tokens = self.token_order(sequences)
        picked = {name: getattr(self, name)[tokens] for name in tensor_names()}
        return replace(self, **picked, lengths=tuple(self.lengths[i] for i in sequences))

    def token_order(self, sequences: list[int]) -> torch.Tensor:
        """Positions of the tokens of the sequences, in the order given."""
        return torch.cat([torch.empty(0, dtype=torch.long), *(self.positions(i) for i in sequences)])


def tensor_names() -> list[str]:
    return [f.name for f in fields(Batch) if f.name != "lengths"]


def random_batch(lengths: tuple[int, ...], seed: int, masked: float = 0.25) -> Batch:
    """A batch in float64 with ratios on both sides of every clip, and some fully masked sequences."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * scale

    old_logp = -normal(1.0).abs() - 1e-3
    loss_mask = torch.rand(size, generator=generator) >= masked
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    loss_mask &= (torch.rand(len(lengths), generator=generator) >= 0.15)[index]
    return Batch(
        logp=old_logp + normal(0.4),
        old_logp=old_logp,
        prox_logp=(old_logp + normal(0.15)).clamp(max=-1e-4),
        ref_logp=old_logp + normal(0.3),
        entropy=normal(1.0).abs(),
        advantages=normal(1.5),
        loss_mask=loss_mask,
        lengths=lengths,
    )


batches = st.builds(
    random_batch,
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6).map(tuple),
    seed=st.integers(0, 2**32),
)
