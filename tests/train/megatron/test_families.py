"""The published models, by the numbers of their config.json, without their weights."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.architecture import check_layout, read_architecture
from unirl.train.megatron.model import PolicyModel, transformer_config
from unirl.train.megatron.names import weight_maps
from unirl.train.megatron.runtime import ParallelRuntime
from unirl.train.megatron.weights import global_parameters


def config(kind, hidden, ffn, layers, heads, groups, vocab, *, tied=False, **others):
    return kind(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        **others,
    )


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
PUBLISHED = {
    "Qwen3-0.6B": (config(Qwen3Config, 1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128), 596_049_920),
    "Qwen3-1.7B": (config(Qwen3Config, 2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128), 1_720_574_976),
    "Qwen3-4B": (config(Qwen3Config, 2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128), 4_022_468_096),
    "Qwen3-8B": (config(Qwen3Config, 4096, 12288, 36, 32, 8, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-14B": (config(Qwen3Config, 5120, 17408, 40, 40, 8, 151936, head_dim=128), 14_768_307_200),
    "Qwen3-32B": (config(Qwen3Config, 5120, 25600, 64, 64, 8, 151936, head_dim=128), 32_762_123_264),
    "Qwen3-30B-A3B": (config(Qwen3MoeConfig, 2048, 6144, 48, 32, 4, 151936, head_dim=128, **EXPERTS), 30_532_122_624),
    "Qwen2.5-0.5B": (config(Qwen2Config, 896, 4864, 24, 14, 2, 151936, tied=True), 494_032_768),
    "Qwen2.5-7B": (config(Qwen2Config, 3584, 18944, 28, 28, 4, 152064), 7_615_616_512),
    "Llama-3.2-1B": (config(LlamaConfig, 2048, 8192, 16, 32, 8, 128256, tied=True), 1_235_814_400),
    "Llama-3.1-8B": (config(LlamaConfig, 4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "SmolLM2-135M": (config(LlamaConfig, 576, 1536, 30, 9, 3, 49152, tied=True), 134_515_008),
}
TENSOR_PARALLEL = {name: [1, 2, 4, 8] for name in PUBLISHED} | {
    "Qwen3-30B-A3B": [1, 2, 4],
    "Qwen2.5-0.5B": [1, 2],
    "Qwen2.5-7B": [1, 2, 4],
    "SmolLM2-135M": [1],
}


def read(config, folder):
    config.save_pretrained(folder)
    return read_architecture(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_parameter_has_a_place(tmp_path, name):
    """One layer stands for all of them."""
    config, published = PUBLISHED[name]
    layers = config.num_hidden_layers
    config = type(config)(**config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    architecture = read(config, tmp_path)
    parallel = ParallelConfig()
    with ParallelRuntime(parallel, seed=0), torch.device("meta"):
        model = PolicyModel(architecture, transformer_config(architecture, parallel, dtype=torch.float32))
        parameters = global_parameters([model])
    maps = [weight for weight in weight_maps(architecture, model.vocab_size) if weight.exported]
    assert parameters.keys() == {weight.name for weight in maps}
    in_layer = sum(tensor.numel() for key, tensor in parameters.items() if ".layers." in key)
    outside = sum(tensor.numel() for key, tensor in parameters.items() if ".layers." not in key)
    assert in_layer * layers + outside == published
    for weight in maps:  # taken apart under Hugging Face names and put together again
        full = dict(weight.merge([parameters[weight.name]]))
        assert weight.read(list(full.values()), 0, 1).shape == parameters[weight.name].shape


def test_number_of_tensors_of_the_mixture_of_experts(tmp_path):
    architecture = read(PUBLISHED["Qwen3-30B-A3B"][0], tmp_path)
    names = [name for weight in weight_maps(architecture, architecture.vocab_size) for name in weight.hf_names]
    assert len(names) == len(set(names)) == 18_867


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensor_parallel_sizes_that_fit(tmp_path, name):
    architecture = read(PUBLISHED[name][0], tmp_path)
    fit = []
    for tp in (1, 2, 4, 8):
        try:
            check_layout(architecture, ParallelConfig(tp=tp, sequence_parallel=tp > 1))
        except UserError:
            continue
        fit.append(tp)
    assert fit == TENSOR_PARALLEL[name]
