"""One real SGLang server, shared by all tests of this folder; without an environment for it they are left out."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.conftest import command, recipe_dir  # noqa: F401  (fixtures)
from unirl.config import compose
from unirl.errors import UserError
from unirl.rollout.sglang import SGLangRolloutEngine, find_python
from unirl.trainer.sglang_setup import make_sglang_engine
from unirl.types import Completion, GenerationRequest, SamplingParams

OVERRIDES = [
    "rollout.engine=sglang",
    "rollout.device=cpu",
    "rollout.max_concurrency=16",
    "rollout.health_interval_s=2",
    "rollout.health_timeout_s=20",
    "rollout.timeout_s=120",
    "rollout.start_timeout_s=500",
    "rollout.max_total_tokens=4096",
    "sync.mode=disk",
    "sync.bucket_mb=1",
    "sync.timeout_s=60",
    "sync.checksum_every=1",
]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """Its interpreter."""
    try:
        return find_python(None)
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def engine(sglang_python, recipe_dir, tmp_path_factory) -> Iterator[SGLangRolloutEngine]:  # noqa: F811
    """An engine with one server, on the model of the recipe `tiny`, made as a run makes it."""
    run_dir = tmp_path_factory.mktemp("sglang")
    config = compose("tiny", [*OVERRIDES, f"run_dir={run_dir}"], [recipe_dir])
    engine = make_sglang_engine(config)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def model(recipe_dir):  # noqa: F811
    """The same model in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(recipe_dir / "model", dtype=torch.float32).eval()


@pytest.fixture
def published(engine, model) -> SGLangRolloutEngine:
    """The engine, with the weights of `model`, whatever the tests before did to it."""
    engine.update_weights(weights_of(model), engine.weight_version + 1)
    return engine


def weights_of(model) -> list[tuple[str, torch.Tensor]]:
    """Hugging Face names and tensors, a tied head once."""
    return list(model.named_parameters())


def perturbed(model, scale: float = 0.3) -> list[tuple[str, torch.Tensor]]:
    """Other weights of the same shapes."""
    noise = torch.Generator().manual_seed(1)
    return [(name, value + scale * torch.randn(value.shape, generator=noise)) for name, value in weights_of(model)]


def requests_in_progress(num_samples: int = 31, num_tokens: int = 100) -> list[GenerationRequest]:
    """A short sample, and long ones, twice as many as the server takes: when the first ends, others are half done."""
    prompt = (5, 6, 7)
    return [
        GenerationRequest(prompt, SamplingParams(8), (0,)),
        GenerationRequest(prompt, SamplingParams(num_tokens), tuple(range(1, num_samples + 1))),
    ]


def while_generating(engine: SGLangRolloutEngine, act: Callable[[], None]) -> list[Completion]:
    """The samples of `requests_in_progress`, with `act` done, in this thread, when the first is finished."""
    result, begun = [], threading.Event()

    def generate() -> None:
        try:
            result.append(engine.generate(requests_in_progress(), lambda finished: begun.set()))
        finally:
            begun.set()

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(120)
    act()
    thread.join(timeout=300)
    assert result, "generation failed or hangs"
    return result[0][1]
