"""The base model of the demo: 120 thousand parameters that can show their work and mostly do not.

Its task is reasoning-gym's `chain_sum`. It first learns from careful demonstrations, then from a lazy tutor who mostly
guesses. Reinforcement learning starts from there: it can bring back the careful skill because that pays.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from unirl.config.schema import DataConfig
from unirl.data import LoadReport, load_prompts
from unirl.data.reasoning_gym import make_problems
from unirl.demo.folder import write_folder
from unirl.demo.imitation import Example, adamw, imitate, matrix_optimizers
from unirl.demo.model import new_model, one_thread
from unirl.demo.tokenizer import train_tokenizer
from unirl.demo.tutor import Tutor, careful

# The `data` section of the recipe arith_drpo_tiny_cpu: the warm-up must never see its held-out problems.
DATA = DataConfig(
    kind="reasoning_gym",
    tasks={"chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}},
    size=3000,
    heldout_size=256,
    seed=0,
    max_prompt_tokens=64,
)
SEED = 0
CAREFUL_STEPS, LAZY_STEPS = 400, 40

_BATCH = 96
_ROLES = ["system", "user", "assistant"]


class _Problem(NamedTuple):
    prompt_ids: tuple[int, ...]
    expression: str
    answer: str


def make_base_model(path: str, *, careful_steps: int = CAREFUL_STEPS, lazy_steps: int = LAZY_STEPS) -> None:
    """Make the Hugging Face folder `path`: a Qwen3 model, its tokenizer with chat template, and generation config.

    Takes about half a minute on one core. Equal calls on one machine give equal bytes. Raises UserError where the
    folder cannot be written.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"Making the base model {path}: {careful_steps} careful steps, then {lazy_steps} lazy ones")
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]), one_thread(), Progress(console=console, transient=True) as progress:
        torch.manual_seed(SEED)
        tokenizer = _make_tokenizer()
        model = new_model(tokenizer)
        bar = progress.add_task("warm start", total=careful_steps + lazy_steps)
        _warm_start(model, tokenizer, careful_steps, lazy_steps, on_step=lambda: progress.advance(bar))
        write_folder(path, model, tokenizer)
    console.print(f"Base model made: {model.num_parameters():,} parameters, {time.perf_counter() - started:.0f} s")


def _make_tokenizer() -> PreTrainedTokenizerFast:
    records = [record for _, record in make_problems(DATA, "train", LoadReport("tokenizer", DATA.max_prompt_tokens))]
    work = [careful(record["metadata"]["expression"]) for record in records]
    return train_tokenizer([record["prompt"] for record in records] + work + _ROLES * len(records))


def _warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    careful_steps: int,
    lazy_steps: int,
    on_step: Callable[[], None],
) -> None:
    """Careful demonstrations with some guesses among them, so that both are known; then the lazy tutor, briefly: its
    low learning rate changes how often the model works carefully more than how well.
    """
    rng = random.Random(SEED)
    prompts = load_prompts(DATA, tokenizer, split="train")
    problems = [
        _Problem(prompt.token_ids, prompt.record["metadata"]["expression"], prompt.record["answer"])
        for prompt in prompts
    ]
    for tutor, steps, optimizers in (
        (Tutor(careful_share=0.9), careful_steps, matrix_optimizers(model, lr=6e-3, matrix_lr=0.03)),
        (Tutor(careful_share=0.08), lazy_steps, [adamw(model.parameters(), lr=1e-3)]),
    ):
        imitate(model, optimizers, _demonstrations(problems, tutor, tokenizer, rng), steps, on_step)


def _demonstrations(
    problems: list[_Problem], tutor: Tutor, tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[list[Example]]:
    """Batches without end, each problem once an epoch."""
    order: list[_Problem] = []
    while True:
        if len(order) < _BATCH:
            order = rng.sample(problems, len(problems))
        batch, order = order[:_BATCH], order[_BATCH:]
        responses = [tutor.respond(problem.expression, problem.answer, rng) for problem in batch]
        encoded = tokenizer(responses)["input_ids"]
        yield [
            (problem.prompt_ids, [*ids, tokenizer.eos_token_id]) for problem, ids in zip(batch, encoded, strict=True)
        ]
