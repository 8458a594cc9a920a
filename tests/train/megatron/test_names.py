import pytest
import torch

from tests.train.megatron.conftest import FAMILIES, make_reference
from unirl.train.megatron.architecture import read_architecture
from unirl.train.megatron.hf_folder import HfTensors
from unirl.train.megatron.names import weight_maps


class Counted:
    """A tensor that counts the entries that are read of it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.shape, self.read = tensor, tensor.shape, 0

    def __getitem__(self, index) -> torch.Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """(architecture, tensors by name) of a family."""
    made = {}

    def get(family: str):
        if family not in made:
            folder = tmp_path_factory.mktemp("names") / family
            make_reference(family).save_pretrained(folder)
            with HfTensors(folder) as stored:
                maps = weight_maps(read_architecture(folder), 128)
                made[family] = maps, {name: stored[name][:] for weight in maps for name in weight.hf_names}
        return made[family]

    return get


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama-tied-9-heads"}))
def test_shards_are_read_without_overlap_and_merge_to_what_was_read(sources, family):
    maps, tensors = sources(family)
    for weight in maps:
        counted = [Counted(tensors[name]) for name in weight.hf_names]
        shards = [weight.read(counted, rank, 2) for rank in range(2)]
        times = 2 if weight.tp_dim is None else 1
        assert [source.read for source in counted] == [source.tensor.numel() * times for source in counted]
        for name, tensor in weight.merge(shards):
            assert torch.equal(tensor, tensors[name]), name


def test_a_shard_of_queries_keys_and_values_has_whole_groups(sources):
    """Rows of heads of 16: a rank of two has query heads 2 and 3 behind one another, then its key and value head."""
    maps, tensors = sources("qwen3-untied")
    (qkv,) = (weight for weight in maps if weight.name == "decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = (tensors[name] for name in qkv.hf_names)
    assert torch.equal(qkv.read([q, k, v], 1, 2), torch.cat([q[32:64], k[16:32], v[16:32]]))


@pytest.mark.parametrize(("rank", "rows"), [(0, 32), (2, 32), (3, 1)])
def test_rows_behind_the_vocabulary_are_zeros(sources, rank, rows):
    maps, tensors = sources("qwen3-untied")
    table = tensors["model.embed_tokens.weight"]
    shard = maps[0].read([table], rank, 4)
    assert torch.equal(shard[:rows], table[32 * rank : 32 * rank + rows])
    assert shard.shape[0] == 32
    assert not shard[rows:].any()


def test_a_shard_of_padding_alone(sources):
    maps, tensors = sources("qwen3-untied")
    table = tensors["model.embed_tokens.weight"]
    shards = [maps[0].read([table], rank, 8) for rank in range(8)]
    assert not shards[7].any()
    assert torch.equal(maps[0].merge(shards)[0][1], table)


def test_what_cannot_be_cut_is_an_error(sources):
    maps, tensors = sources("qwen3-untied")
    (proj,) = (weight for weight in maps if weight.name == "decoder.layers.1.mlp.linear_fc2.weight")
    with pytest.raises(ValueError, match=r"linear_fc2\.weight cannot be cut into 5 pieces: shape \(32, 48\)"):
        proj.read([tensors[name] for name in proj.hf_names], 0, 5)
