"""Supervised learning of demonstrations, for models small enough to train on one core in half a minute."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its response, the end-of-sequence token included."""

_NO_TARGET = -100
_WARMUP_STEPS = 20


def imitate(
    model: PreTrainedModel,
    optimizers: Sequence[Optimizer],
    batches: Iterator[list[Example]],
    steps: int,
    on_step: Callable[[], None],
) -> None:
    """Train `model` in place on `steps` batches: cross-entropy of the response tokens, in nats, mean over a batch.

    Learning rates rise from 0 over the first steps and fall to 0 at the last one. `on_step` is called after each.
    """
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    for step in range(steps):
        for group, peak in peaks:
            group["lr"] = peak * min((step + 1) / _WARMUP_STEPS, 1) * (1 - step / steps)
        response_loss(model, next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        on_step()
    model.eval()


def response_loss(model: PreTrainedModel, batch: Sequence[Example]) -> torch.Tensor:
    """Cross-entropy of the response tokens, in nats, mean over all of them (a scalar)."""
    longest = max(len(prompt) + len(response) for prompt, response in batch)
    inputs = torch.zeros(len(batch), longest - 1, dtype=torch.long)
    targets = torch.full_like(inputs, _NO_TARGET)
    for row, (prompt, response) in enumerate(batch):
        tokens = torch.tensor([*prompt, *response])
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, len(prompt) - 1 : len(tokens) - 1] = tokens[len(prompt) :]
    # Rows are padded at their end, where a causal model sees nothing of it: no attention mask is needed.
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    wanted = targets != _NO_TARGET
    return F.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def matrix_optimizers(model: PreTrainedModel, *, lr: float, matrix_lr: float) -> list[Optimizer]:
    """Muon (https://kellerjordan.github.io/posts/muon) for the matrices of the layers, AdamW for all else: half the
    steps that AdamW alone needs here.
    """
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return [adamw(others, lr), Muon(matrices, lr=matrix_lr, weight_decay=0.0)]


def adamw(parameters: Iterable[torch.nn.Parameter], lr: float) -> AdamW:
    """AdamW without decay, for a short training."""
    return AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
