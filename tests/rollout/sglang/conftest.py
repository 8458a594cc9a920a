"""One real SGLang server, shared by all tests of this folder; without an environment for it they are left out."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.conftest import command, recipe_dir, train  # noqa: F401  (fixtures)
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
    "rollout.start_timeout_s=240",
    "rollout.server_args={max_total_tokens: 4096}",
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


def long_request(num_samples: int = 48, num_tokens: int = 100) -> GenerationRequest:
    """Three times as many samples as the server takes at once: when the first is done, others are half done."""
    return GenerationRequest((5, 6, 7), SamplingParams(num_tokens), tuple(range(num_samples)))


def while_generating(
    engine: SGLangRolloutEngine, request: GenerationRequest, act: Callable[[], None]
) -> list[Completion]:
    """The samples of `request`, with `act` done (in this thread) when the first of them is finished."""
    result, begun = [], threading.Event()

    def generate() -> None:
        try:
            result.append(engine.generate([request], lambda finished: begun.set()))
        finally:
            begun.set()

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(120)
    act()
    thread.join(timeout=240)
    assert result, "generation failed or hangs"
    return result[0][0]
