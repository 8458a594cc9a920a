"""Checkpoints of real shards between layouts: what is loaded is what was trained, and training goes on from it.

The layouts of a group of processes are gone through in order; each also goes on from what the one before has saved.
"""

import json
import os
import resource
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from tests.train.megatron.conftest import weighted_loss
from unirl.audit.parallel.batches import SHAPES, make_part
from unirl.cluster.spawn import RankError, run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointStore, CheckpointWriteError
from unirl.train.megatron import dist_checkpoint
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.weights import _FullTensors, global_parameters
from unirl.train.packing import plan_for

VOCAB = 131
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS = {
    "qwen3-tied": Qwen3Config(**_SIZES, tie_word_embeddings=True),
    "qwen3-moe": Qwen3MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
PARTS = [make_part(shapes, VOCAB, seed=seed) for seed, shapes in enumerate(SHAPES)]
KINDS = ("master", "exp_avg", "exp_avg_sq")
SHARES = {"use_distributed_optimizer": True}


@dataclass(frozen=True)
class Layout:
    """before: what is gone on from, beside the layout's own checkpoint."""

    name: str
    parallel: ParallelConfig
    before: str
    model: str = "qwen3-tied"
    dtype: str = "float32"


@dataclass
class Report:
    """Of one layout on one rank. states: after two steps, by kind and Hugging Face name; finals: weights after four."""

    state: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]
    own_state: dict[str, torch.Tensor]
    own_final: dict[str, torch.Tensor]
    own_results: list = field(default_factory=list)
    results: list = field(default_factory=list)
    others_state: dict[str, torch.Tensor] = field(default_factory=dict)
    others_final: dict[str, torch.Tensor] = field(default_factory=dict)


FOUR = [
    Layout("tp4", ParallelConfig(tp=4, sequence_parallel=True), "single"),
    Layout("tp2-pp2", ParallelConfig(tp=2, pp=2), "tp4"),
    Layout("dp4-shares", ParallelConfig(**SHARES), "tp2-pp2"),
]
TWO = [
    Layout("dp2-shares", ParallelConfig(**SHARES), "dp4-shares"),
    Layout("dp2", ParallelConfig(), "dp2-shares"),
    Layout("tp2", ParallelConfig(tp=2, sequence_parallel=True), "dp2"),
    Layout("pp2-vpp2", ParallelConfig(pp=2, vpp=2), "tp2"),
    Layout("cp2-shares", ParallelConfig(cp=2, **SHARES), "pp2-vpp2"),
    Layout("tp2-bf16", ParallelConfig(tp=2), "dp2-shares", dtype="bfloat16"),
    Layout("dp2-shares-bf16", ParallelConfig(**SHARES), "tp2-bf16", dtype="bfloat16"),
    Layout("ep2-shares", ParallelConfig(ep=2, **SHARES), "single-moe", "qwen3-moe"),
    Layout("tp2-moe", ParallelConfig(tp=2, sequence_parallel=True), "ep2-shares", "qwen3-moe"),
]
SINGLE = [
    Layout("single", ParallelConfig(), "single"),
    Layout("single-moe", ParallelConfig(), "single-moe", "qwen3-moe"),
]
LAYOUTS = {layout.name: layout for layout in SINGLE + FOUR + TWO}


def make_actor(root: Path, layout: Layout) -> MegatronActor:
    return MegatronActor(
        ModelConfig(path=str(root / layout.model), dtype=layout.dtype),
        parallel=layout.parallel,
        optimizer=OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=1),
        stack=StackConfig(),
        temperature=1.0,
        total_steps=4,
        seed=0,
    )


def train(actor: MegatronActor, parts: list) -> list:
    return [step(actor, part) for part in parts]


def step(actor: MegatronActor, part):
    plan = plan_for(actor, part, torch.arange(len(part)), StackConfig(micro_batch_tokens=80))
    count = len(plan) // actor.shape.dp
    actor.forward_backward(plan[actor.dp_rank * count : (actor.dp_rank + 1) * count], weighted_loss)
    return actor.optimizer_step()


FIRST, LAST = PARTS[:2], [PARTS[2], PARTS[0]]


def full_state(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """Masters and moments of the whole model by Hugging Face name, gathered as weights are exported."""
    state = {}
    for kind in KINDS:
        shards = {name: gather(actor, parameter, kind) for name, parameter in global_parameters(actor.chunks).items()}
        state |= {f"{kind} {name}": tensor.clone() for name, tensor in _FullTensors(actor.chunks[0], shards, "all")}
    return state | {f"weight {name}": tensor.clone() for name, tensor in actor.export_weights()}


def gather(actor: MegatronActor, parameter, kind: str) -> torch.Tensor:
    """This rank's whole shard, of which the replicas may have shares."""
    whole, shard = torch.zeros(parameter.numel()), actor.optimizer.shard_of(parameter)
    if shard is not None:
        tensor = shard.master if kind == "master" else shard.moments[kind]
        whole[shard.start : shard.stop] = tensor.detach().view(-1)
    if actor.parallel.use_distributed_optimizer:
        is_expert = not getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_expert_data_parallel_group()
            if is_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        dist.all_reduce(whole, group=group)  # the others have zeros there
    return whole.view(parameter.shape)


def go_through(root: Path, layouts: list[Layout]) -> list[Report]:
    return [run_layout(root, layout) for layout in layouts]


def run_layout(root: Path, layout: Layout) -> Report:
    """Two steps, a save, two more; then the last two again, from the own save and from that of another layout."""
    actor, other = make_actor(root, layout), make_actor(root, layout)
    try:
        train(actor, FIRST)
        save(actor, root / layout.name)
        report = Report(full_state(actor), {}, {}, {})
        report.results = train(actor, LAST)
        report.final = full_state(actor)
        other.load(root / layout.name)
        report.own_state = full_state(other)
        report.own_results = train(other, LAST)
        report.own_final = full_state(other)
        other.load(root / layout.before)
        report.others_state = full_state(other)
        train(other, LAST)
        report.others_final = full_state(other)
        return report
    finally:
        other.close()
        actor.close()


def save(actor: MegatronActor, folder: Path) -> dict:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return actor.save(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("resharding")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def reports(root):
    """Of each layout, those of its ranks."""
    found = {layout.name: [run_layout(root, layout)] for layout in SINGLE}
    for layouts, size in ((FOUR, 4), (TWO, 2)):
        by_rank = run_ranks(go_through, size, root, layouts, timeout_s=240)
        found |= {
            layout.name: list(of_ranks) for layout, of_ranks in zip(layouts, zip(*by_rank, strict=True), strict=True)
        }
    return found


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_layout_goes_on_to_the_bit(reports, name):
    for report in reports[name]:
        assert_same(report.own_state, report.state)
        assert report.own_results == report.results
        assert_same(report.own_final, report.final)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_is_taken_up_to_the_bit_and_goes_on_within_rounding(reports, name):
    before = reports[LAYOUTS[name].before][0]
    in_bf16 = LAYOUTS[name].dtype == "bfloat16"
    for report in reports[name]:
        kept = {key: tensor for key, tensor in before.state.items() if not key.startswith("weight") or not in_bf16}
        assert_same({key: report.others_state[key] for key in kept}, kept)
        for key, tensor in report.others_state.items():
            if key.startswith("weight"):
                assert torch.equal(tensor, report.others_state[key.replace("weight", "master", 1)].to(tensor.dtype))
        if not in_bf16:
            for key, tensor in before.final.items():
                torch.testing.assert_close(report.others_final[key], tensor, atol=2e-6, rtol=2e-4, msg=key)


def test_one_process_takes_up_every_layout(root, reports):
    for name, layout in LAYOUTS.items():
        if layout.dtype == "float32":
            actor = make_actor(root, LAYOUTS["single-moe" if layout.model == "qwen3-moe" else "single"])
            actor.load(root / name)
            assert_same(full_state(actor), reports[name][0].state)
            actor.close()


def test_replicas_share_the_writing(root, reports):
    """Every rank has a file, and all of them together hold each tensor once."""
    for name in ("dp4-shares", "dp2-shares", "dp2", "cp2-shares", "tp2", "pp2-vpp2"):
        files = sorted((root / name).glob("*.distcp"))
        sizes = [file.stat().st_size for file in files]
        assert len(files) == (4 if name.startswith("dp4") else 2)
        assert max(sizes) < 2 * min(sizes), name
    alone = (root / "single" / "__0_0.distcp").stat().st_size
    assert sum(file.stat().st_size for file in (root / "dp2").glob("*.distcp")) < 1.5 * alone


class OnAllRanks:
    """The actor of every rank, driven by rank 0 as a driver's proxy does."""

    def __init__(self, actor: MegatronActor):
        self.actor = actor

    def __getattr__(self, method):
        return lambda *args: self.call(method, *args)

    def call(self, method, *args):
        dist.broadcast_object_list([(method, args)], src=0)
        return self.perform(method, args)

    def perform(self, method, args):
        try:
            result, error = getattr(self.actor, method)(*args), None
        except (CheckpointWriteError, UserError) as failure:
            result, error = None, failure
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (result, error))
        if dist.get_rank() == 0:
            errors = [error for _, error in everyone if error is not None]
            assert len(errors) in (0, len(everyone)), "a failure is one of all ranks"
            if errors:
                raise errors[0]
            results = [result for result, _ in everyone]
            return {"save_done": all, "check_files": lambda found: next(filter(None, found), None)}.get(
                method, lambda found: found[0]
            )(results)
        return None

    def follow(self) -> None:
        """What the other ranks do until rank 0 has ended."""
        while True:
            command = [None]
            dist.broadcast_object_list(command, src=0)
            if command[0] is None:
                return
            self.perform(*command[0])


def limit_file_size(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Writer(dist_checkpoint._Writer):
    """Writes when it may, and then kills its process where that is wanted."""

    may_write = threading.Event()
    kills = False

    def write(self):
        assert self.may_write.wait(60)
        super().write()
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)


class FaultyActor(MegatronActor):
    def step(self, index: int) -> None:
        step(self, PARTS[index])

    def state(self) -> dict:
        return full_state(self)

    def hold_writers(self) -> None:
        Writer.may_write.clear()

    def release_writers(self) -> None:
        Writer.may_write.set()

    def limit_files_of_rank_1(self, size: int) -> None:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def kill_writer_of_rank_1(self) -> None:
        Writer.kills = dist.get_rank() == 1


def drive(root: Path) -> None:
    """Rank 1 dies at the end; what rank 0 was told is in `said.json`."""
    dist_checkpoint._Writer = Writer
    actor = make_actor(root, LAYOUTS["dp2-shares"])
    actor.__class__ = FaultyActor
    model = OnAllRanks(actor)
    if dist.get_rank() != 0:
        model.follow()
    store = CheckpointStore(root / "driven", keep=3)
    lived = save_in_background(store, model)
    fill_a_disk(store, model, lived)
    (root / "said.json").write_text(json.dumps(damage_files(store, model, lived)))
    model.kill_writer_of_rank_1()
    store.save(2, {}, {"actor": model})


def save_in_background(store: CheckpointStore, model: OnAllRanks) -> dict[int, dict]:
    """States of the two iterations that were saved, each with a step between its beginning and its writing."""
    lived = {}
    for iteration in (1, 2):
        model.step(iteration)
        lived[iteration] = model.state()
        model.hold_writers()
        store.begin(iteration, {"iteration": iteration}, {"actor": model})
        model.step(0)
        store.publish()
        assert store.iterations() == list(range(1, iteration)), "the files are not down"
        model.release_writers()
        store.finish()
    return lived


def fill_a_disk(store: CheckpointStore, model: OnAllRanks, lived: dict[int, dict]) -> None:
    model.limit_files_of_rank_1(20_000)  # stands for its full disk: the same write fails
    store.begin(3, {}, {"actor": model})
    model.step(0)
    with pytest.raises(UserError, match=r"iteration 3 could not be written.*: rank 1: .*File too large"):
        store.finish()
    model.limit_files_of_rank_1(resource.RLIM_INFINITY)
    lived[3] = model.state()
    store.save(3, {"iteration": 3}, {"actor": model})
    assert store.iterations() == [1, 2, 3]


def damage_files(store: CheckpointStore, model: OnAllRanks, lived: dict[int, dict]) -> list[str]:
    """What is said of them, by the time that only the oldest is left."""
    said = []
    for iteration, state in lived.items():
        assert store.load(iteration, {"actor": model}) == {"iteration": iteration}
        assert_same(model.state(), state)
    for iteration, file in ((3, "__1_0.distcp"), (2, "__0_0.distcp")):
        path = store.folder(iteration) / "actor" / file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert store.load_newest({"actor": model}, said.append) == {"iteration": 1}
    assert_same(model.state(), lived[1])
    return said


def test_saves_of_two_ranks_in_the_background_with_full_disk_damage_and_kill(root):
    """Each save is of its moment; a full disk of one rank is everybody's error; another byte is found on whichever
    rank; what a killed rank leaves behind is passed over.
    """
    with pytest.raises(RankError):
        run_ranks(drive, 2, root, timeout_s=120)
    said = json.loads((root / "said.json").read_text())
    assert len(said) == 2
    assert "actor/__1_0.distcp is not what was written: its checksum differs; going back" in said[0]
    assert "actor/__0_0.distcp is not what was written" in said[1]
    store = CheckpointStore(root / "driven", keep=3)
    assert store.iterations() == [1]
    assert (store.path / ".tmp-iteration_00000002" / "actor").is_dir()
    actor = make_actor(root, LAYOUTS["single"])
    assert store.load_newest({"actor": actor}, print) == {"iteration": 1}
    store.save(2, {}, {"actor": actor})
    assert store.iterations() == [1, 2]
    assert not list(store.path.glob(".tmp*"))
    actor.close()
