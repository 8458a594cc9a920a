"""From a `Part` to micro-batches: packed tokens, who attends to whom, and which token is predicted where."""

from dataclasses import dataclass

import torch

from unirl.types import Part, TextSegment
from unirl.types.part import TOKEN_ESTIMATES


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples for one forward and backward pass: T tokens, G trees, N samples, R response tokens.

    A *tree* is a prompt followed by one or more responses to it (*branches*). A token attends to the earlier tokens of
    its tree that belong to the prompt or to its own branch. Without prompt sharing a tree is one sample and attention
    within it is plainly causal. Trees never see each other.

    tokens [T] int64, position_ids [T] int64 (each branch goes on where the prompt ends).
    branch_ids [T] int64: 0 on the tokens that every branch sees, 1.. on those of a branch.
    tree_cu_seqlens [G+1] int64: bounds of the trees in `tokens`.
    predict_positions [R] int64: position in `tokens` whose hidden state predicts the response token.
    targets [R] int64: the response tokens, sample after sample.
    loss_cu_seqlens [N+1] int64: bounds of the samples in the R response tokens.
    old_logp [R] float32: rollout log-probs.
    loss_mask [R] bool: False on a response token that is left out (a value that is not finite).
    sample_positions [N] int64: position of each sample in the Part.
    token_positions [R] int64: position of each response token in the Part's tokens.
    advantages, prox_logp, ref_logp, values, returns [R] float32, or None where the Part has none.
    """

    tokens: torch.Tensor
    position_ids: torch.Tensor
    branch_ids: torch.Tensor
    tree_cu_seqlens: torch.Tensor
    predict_positions: torch.Tensor
    targets: torch.Tensor
    loss_cu_seqlens: torch.Tensor
    old_logp: torch.Tensor
    loss_mask: torch.Tensor
    sample_positions: torch.Tensor
    token_positions: torch.Tensor
    advantages: torch.Tensor | None = None
    prox_logp: torch.Tensor | None = None
    ref_logp: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None


def plan_micro_batches(
    part: Part, samples: torch.Tensor, *, token_budget: int, share_prompts: bool = False
) -> list[MicroBatch]:
    """Pack the samples at the positions `samples` [M] int64 into micro-batches of at most `token_budget` tokens.

    Prompt and response tokens count; with `share_prompts` the prompt of a group counts once for each tree. Samples
    without a response token are left out. The plan depends on nothing but its arguments.

    Raises ValueError when one sample alone exceeds the budget (it names the sample).
    """
    text = part.text
    samples = samples[text.response_lengths[samples] > 0]
    layout = _Layout(text)
    trees = _trees(layout, samples.tolist(), token_budget, share_prompts)
    bins = first_fit_decreasing([layout.tree_tokens(tree) for tree in trees], token_budget)
    return [_pack(part, layout, [trees[i] for i in members]) for members in bins]


def first_fit_decreasing(sizes: list[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `sizes`, the sum of each bin at most `capacity`; indices ascend within a bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        slot = next((b for b, left in enumerate(room) if left >= sizes[index]), None)
        if slot is None:
            slot = len(bins)
            bins.append([])
            room.append(capacity)
        bins[slot].append(index)
        room[slot] -= sizes[index]
    return [sorted(members) for members in bins]


class _Layout:
    """Where each sample's prompt and response lie in a TextSegment, as Python ints."""

    def __init__(self, text: TextSegment):
        self.text = text
        self.start = text.cu_seqlens[:-1].tolist()
        self.length = text.lengths.tolist()
        self.prompt = text.prompt_lengths.tolist()
        self.group = text.group_ids.tolist()

    def response_tokens(self, sample: int) -> int:
        return self.length[sample] - self.prompt[sample]

    def tree_tokens(self, tree: list[int]) -> int:
        return self.prompt[tree[0]] + sum(map(self.response_tokens, tree))

    def prompt_ids(self, sample: int) -> torch.Tensor:
        return self.text.tokens[self.start[sample] : self.start[sample] + self.prompt[sample]]


def _trees(layout: _Layout, samples: list[int], token_budget: int, share_prompts: bool) -> list[list[int]]:
    """Samples that share one prompt pass, each list within the token budget."""
    open_trees: dict[int, list[int]] = {}
    trees: list[list[int]] = []
    for sample in samples:
        if layout.length[sample] > token_budget:
            raise ValueError(
                f"sample {int(layout.text.sample_ids[sample])} has {layout.length[sample]} tokens, more than the "
                f"budget of a micro-batch, {token_budget}: raise stack.micro_batch_tokens"
            )
        tree = open_trees.get(layout.group[sample]) if share_prompts else None
        if (
            tree is not None
            and layout.tree_tokens(tree) + layout.response_tokens(sample) <= token_budget
            and torch.equal(layout.prompt_ids(tree[0]), layout.prompt_ids(sample))
        ):
            tree.append(sample)
        else:
            trees.append([sample])
            open_trees[layout.group[sample]] = trees[-1]
    return trees


def _pack(part: Part, layout: _Layout, trees: list[list[int]]) -> MicroBatch:
    text = part.text
    source, position_ids, branch_ids, predict, loss_tokens = [], [], [], [], []
    bounds, loss_counts, end = [0], [], 0
    for tree in trees:
        tree_start, prompt = end, layout.prompt[tree[0]]
        source.append(torch.arange(prompt) + layout.start[tree[0]])
        position_ids.append(torch.arange(prompt))
        branch_ids.append(torch.zeros(prompt, dtype=torch.int64))
        end += prompt
        for branch, sample in enumerate(tree, start=1):
            response = torch.arange(prompt, layout.length[sample])
            source.append(response + layout.start[sample])
            position_ids.append(response)
            # A tree of one sample is plain causal text: every token is on the trunk.
            branch_ids.append(torch.full_like(response, branch if len(tree) > 1 else 0))
            generated = response[text.loss_mask[layout.start[sample] + response]]
            predict.append(_predicting_positions(generated, prompt, tree_start, end))
            loss_tokens.append(generated + layout.start[sample])
            loss_counts.append(generated.numel())
            end += response.numel()
        bounds.append(end)
    source, loss_tokens = torch.cat(source), torch.cat(loss_tokens)
    estimates = {name: getattr(part, name) for name in TOKEN_ESTIMATES}
    estimates = {name: value[loss_tokens] for name, value in estimates.items() if value is not None}
    old_logp = text.log_probs[loss_tokens]
    return MicroBatch(
        tokens=text.tokens[source],
        position_ids=torch.cat(position_ids),
        branch_ids=torch.cat(branch_ids),
        tree_cu_seqlens=torch.tensor(bounds),
        predict_positions=torch.cat(predict),
        targets=text.tokens[loss_tokens],
        loss_cu_seqlens=torch.tensor([0, *loss_counts]).cumsum(0),
        old_logp=old_logp,
        loss_mask=torch.isfinite(torch.stack([old_logp, *estimates.values()])).all(0),
        sample_positions=torch.tensor([sample for tree in trees for sample in tree]),
        token_positions=loss_tokens,
        **estimates,
    )


def _predicting_positions(positions: torch.Tensor, prompt: int, tree_start: int, branch_start: int) -> torch.Tensor:
    """The one shift by one between logits and tokens: the token at position p of a sample is predicted by the hidden
    state at position p - 1, which lies on the shared prompt where p is the first token of a branch.
    """
    previous = positions - 1
    return torch.where(previous < prompt, tree_start + previous, branch_start + previous - prompt)
