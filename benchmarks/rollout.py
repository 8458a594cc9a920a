"""The native rollout engine against `generate()` of transformers: the same model, prompts, samples and threads.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py --shape tiny

Both sides draw from the full distribution and give the log-prob of every token. Weights are random, nothing stops
early, so both do the same work. Rounds alternate; the table shows medians of tokens per CPU second and per second.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import transformers

from unirl.rollout.native import NativeRolloutEngine
from unirl.types import GenerationRequest, SamplingParams

_SHAPES = {
    "tiny": transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "135m": transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=_SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt-length", type=int, default=20, help="longest prompt; the shortest has half of it")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    config = _SHAPES[args.shape]
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = NativeRolloutEngine(folder, max_batch_size=args.prompts * args.samples)
    prompts = _make_prompts(args, config.vocab_size)

    sides = {"transformers": _transformers_side(model, prompts, args), "native": _native_side(engine, prompts, args)}
    speeds = _measure(sides, args.rounds)
    print(f"{'':14}{'tokens / CPU s':>16}{'tokens / s':>14}")
    for side, (by_cpu, by_wall) in speeds.items():
        print(f"{side:14}{by_cpu:16,.0f}{by_wall:14,.0f}")
    ratios = [native / other for native, other in zip(speeds["native"], speeds["transformers"], strict=True)]
    print(f"{'ratio':14}{ratios[0]:16.2f}{ratios[1]:14.2f}")


def _make_prompts(args: argparse.Namespace, vocab_size: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    lengths = [rng.randint(args.prompt_length // 2, args.prompt_length) for _ in range(args.prompts)]
    return [tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths]


def _native_side(engine: NativeRolloutEngine, prompts: list, args: argparse.Namespace) -> Callable[[], int]:
    params = SamplingParams(max_new_tokens=args.new_tokens)
    requests = [
        GenerationRequest(prompt, params, tuple(range(number * args.samples, (number + 1) * args.samples)))
        for number, prompt in enumerate(prompts)
    ]
    return lambda: sum(len(completion.token_ids) for group in engine.generate(requests) for completion in group)


def _transformers_side(model, prompts: list, args: argparse.Namespace) -> Callable[[], int]:
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    @torch.inference_mode()
    def run() -> int:
        output = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            num_return_sequences=args.samples,
            do_sample=True,
            top_k=0,
            max_new_tokens=args.new_tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        drawn = output.sequences[:, width:]
        log_probs = [
            torch.log_softmax(logits.float(), -1).gather(1, drawn[:, step, None])
            for step, logits in enumerate(output.logits)
        ]
        return torch.cat(log_probs, 1).numel()

    return run


def _measure(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of tokens per CPU second and per second, after one round that is not counted."""
    seen = {side: [] for side in sides}
    for counted in [False, *[True] * rounds]:
        for side, run in sides.items():
            cpu, wall = time.process_time(), time.perf_counter()
            num_tokens = run()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if counted:
                seen[side].append((num_tokens / cpu, num_tokens / wall))
    return {side: tuple(map(statistics.median, zip(*values, strict=True))) for side, values in seen.items()}


if __name__ == "__main__":
    main()
