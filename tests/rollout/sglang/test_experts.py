"""A real server with a mixture of experts: its weights arrive by every way, and its checksums are known."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.rollout.conftest import reference_log_probs
from tests.rollout.sglang.test_live_sync import LIMIT_S, TRANSFERS
from unirl.rollout.sglang import EngineOptions, FleetLimits, ServerOptions, SGLangRolloutEngine, WeightSyncError
from unirl.rollout.weights import read_weights
from unirl.sync import DiskTransfer
from unirl.types import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

REQUEST = GenerationRequest((3, 4, 5, 6), SamplingParams(8), (0,))


def make_folder(path, seed: int):
    """The width of an expert is one that a CPU server pads."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(path)
    weights = read_weights(path, tied=False, dtype=torch.float32, device=torch.device("cpu"))
    return model, list(weights.items())


def test_every_way_brings_all_experts(sglang_python, tmp_path, monkeypatch):
    make_folder(tmp_path / "model", 0)
    limits = {"bucket_bytes": 30_000, "timeout_s": LIMIT_S}
    transfers = [DiskTransfer(tmp_path / "weights", **limits), *(make(**limits) for make in TRANSFERS.values())]
    options = ServerOptions(
        sglang_python,
        str(tmp_path / "model"),
        "float32",
        tmp_path / "sglang.log",
        max_running=4,
        max_total_tokens=512,
    )
    engine = SGLangRolloutEngine(
        tmp_path / "model",
        [options],
        transfers[0],
        limits=FleetLimits(start_timeout_s=500, health_interval_s=600),
        options=EngineOptions(checksum_every=1),
    )
    try:
        for version, transfer in enumerate(transfers, 1):
            monkeypatch.setattr(engine._publisher, "_transfer", transfer)
            model, weights = make_folder(tmp_path / f"model-{version}", version)
            engine.update_weights(weights, version)
            [[sample]] = engine.generate([REQUEST])
            expected = reference_log_probs(model, REQUEST.prompt_ids, sample.token_ids)
            torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)
        sums = engine.run(engine.controls[0].checksums(timeout_s=LIMIT_S))
        damaged = [{**ranks, "model.layers.1.mlp.experts.w2_weight": "0"} for ranks in sums]

        async def of_damaged(control, *, timeout_s):
            return damaged

        monkeypatch.setattr(type(engine.controls[0]), "checksums", of_damaged)
        with pytest.raises(
            WeightSyncError, match=r"1 of 21 weights differ .* model\.layers\.1\.mlp\.experts\.w2_weight"
        ):
            engine.update_weights(weights, 4)
    finally:
        engine.close()
