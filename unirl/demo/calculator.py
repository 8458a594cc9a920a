r"""The base model of the multi-turn example: it can use a calculator over several turns and mostly guesses at once.

Its task is reasoning-gym's `chain_sum` with numbers of two digits, against the environment `calculator`. Like the
model of `unirl.demo.arith` it first imitates careful work (a call for each operation, then the answer) and then a lazy
tutor who guesses the answer in the first turn. What the calculator says is never a target.
"""

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from unirl.config.schema import DataConfig
from unirl.data import LoadReport, Prompt, load_prompts
from unirl.data.reasoning_gym import make_problems
from unirl.demo.folder import write_folder
from unirl.demo.imitation import Example, adamw, imitate, matrix_optimizers
from unirl.demo.model import new_model, one_thread
from unirl.demo.tokenizer import train_tokenizer
from unirl.rollout.chat import ChatContinuation
from unirl.rollout.environments.calculator import USAGE, Calculator

# The `data` section of the recipe calculator_multi_turn_tiny_cpu: the warm-up must never see its held-out problems.
DATA = DataConfig(
    kind="reasoning_gym",
    tasks={"chain_sum": {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2}},
    size=3000,
    heldout_size=128,
    seed=0,
    max_prompt_tokens=64,
)
SEED = 0
CAREFUL_STEPS, LAZY_STEPS = 300, 40

_BATCH = 96
_ROLES = ["system", "user", "assistant", "tool"]
_MISSES = [miss for miss in range(-9, 10) if miss]


def make_base_model(path: str, *, careful_steps: int = CAREFUL_STEPS, lazy_steps: int = LAZY_STEPS) -> None:
    """Make the Hugging Face folder `path`: a Qwen3 model, its tokenizer with chat template, and generation config.

    Equal calls on one machine give equal bytes. Raises UserError where the folder cannot be written.
    """
    console = Console(stderr=True, highlight=False)
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


def calls(expression: str) -> list[str]:
    """A call for each operation of a sum of at least two terms: "34 + 57 - 12" gives calc(34+57), calc(91-12)."""
    first, *rest = expression.split()
    total, made = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        made.append(f"calc({total}{operator}{term})")
        total += int(term) if operator == "+" else -int(term)
    return made


def _make_tokenizer() -> PreTrainedTokenizerFast:
    records = [record for _, record in make_problems(DATA, "train", LoadReport("tokenizer", DATA.max_prompt_tokens))]
    work = [" ".join(calls(record["metadata"]["expression"])) for record in records]
    answers = [f"\\boxed{{{record['answer']}}}" for record in records]
    return train_tokenizer([record["prompt"] for record in records] + work + answers + [USAGE, *_ROLES] * len(records))


def _warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    careful_steps: int,
    lazy_steps: int,
    on_step: Callable[[], None],
) -> None:
    rng = random.Random(SEED)
    prompts = list(load_prompts(DATA, tokenizer, split="train"))
    chat = ChatContinuation(tokenizer, [tokenizer.eos_token_id])
    for careful_share, steps, optimizers in (
        (0.9, careful_steps, matrix_optimizers(model, lr=6e-3, matrix_lr=0.03)),
        (0.06, lazy_steps, [adamw(model.parameters(), lr=1e-3)]),
    ):
        turns = _turns(prompts, tokenizer, chat, careful_share, rng)
        batches = iter(lambda turns=turns: list(islice(turns, _BATCH)), None)
        imitate(model, optimizers, batches, steps, on_step)


def _turns(
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    chat: ChatContinuation,
    careful_share: float,
    rng: random.Random,
) -> Iterator[Example]:
    """Turns without end, each with all that stands before it; every problem once an epoch."""
    while True:
        for prompt in rng.sample(prompts, len(prompts)):
            answer = int(prompt.record["answer"])
            responses = [f"\\boxed{{{answer + rng.choice(_MISSES)}}}"]
            if rng.random() < careful_share:
                responses = [*calls(prompt.record["metadata"]["expression"]), f"\\boxed{{{answer}}}"]
            yield from _episode(prompt, responses, tokenizer, chat)


def _episode(
    prompt: Prompt, responses: list[str], tokenizer: PreTrainedTokenizerFast, chat: ChatContinuation
) -> Iterator[Example]:
    """The turns of an episode in which the policy says `responses`."""
    calculator, context = Calculator(), list(prompt.token_ids)
    calculator.reset(prompt.record, seed=0)
    for response in responses:
        generated = [*tokenizer(response)["input_ids"], tokenizer.eos_token_id]
        yield context, generated
        result = calculator.step(response)
        context = [*context, *generated, *([] if result.done else chat.after_turn(generated[-1], result.observation))]
