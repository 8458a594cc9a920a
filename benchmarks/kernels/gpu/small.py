"""Every launch once, at sizes for compute-sanitizer: `compute-sanitizer python -m benchmarks.kernels.gpu.small`."""

import torch

from unirl.algorithms import PolicyLossConfig
from unirl.kernels import available_backends, fused_policy_loss, token_logprob

SIZES = ((1, 1, 1), (3, 11, 7), (2, 5003, 5001), (2, 40_000, 39_984))
"""Tokens, columns of storage, real vocabulary."""
LOSSES = ("ppo", "drpo", "spo", "dppo", "sapo", "cispo")


def main() -> None:
    """Calls token_logprob and fused_policy_loss, forward and backward, on every back-end of this GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        for backend in (name for name in available_backends() if name in ("triton", "cuda")):
            for dtype in (torch.bfloat16, torch.float32):
                for size in SIZES:
                    _run(backend, dtype, *size)
            print(f"{backend}: {2 * len(SIZES)} sizes, {len(LOSSES)} losses")


def _run(backend: str, dtype: torch.dtype, tokens: int, width: int, vocab: int) -> None:
    options = {"vocab": vocab, "temperature": 0.7, "backend": backend}
    targets = torch.randint(vocab, (tokens,))
    buffer = torch.randn(tokens, width + 5).to(dtype)
    for first, with_entropy in ((0, True), (3, False)):  # rows on and off 16-byte boundaries
        logits = buffer.clone()[:, first : first + width].requires_grad_()
        logp, entropy = token_logprob(logits, targets, with_entropy=with_entropy, **options)
        (logp.sum() + (entropy.sum() if with_entropy else 0)).backward()
    mask = torch.arange(tokens) != 1  # one row that is not read
    for loss in LOSSES if vocab == SIZES[1][2] else LOSSES[:1]:
        logits = buffer.clone()[:, :width].requires_grad_()
        values = {"old_logp": logp.detach() - 0.1, "advantages": torch.randn(tokens), "weights": torch.ones(tokens)}
        found = fused_policy_loss(logits, targets, PolicyLossConfig(loss=loss), loss_mask=mask, **values, **options)
        (2 * found.loss).backward()


if __name__ == "__main__":
    main()
