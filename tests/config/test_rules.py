"""Rules between keys: each is broken once, and each reads only the keys that it declares."""

import dataclasses
import json
import re

import pytest

from unirl.config.rules import RULES
from unirl.errors import ConfigError

SPLIT = (
    *("cluster.layout=split", "num_devices=4", "rollout.num_devices=2"),
    *("rollout.engine=sglang", "sync.mode=distributed"),
)

# name of the rule: overrides that break it, the key it is reported under, what the message says
BROKEN = {
    "devices_hold_whole_models": (
        ["num_devices=48", "parallel.tp=5"],
        "num_devices",
        "48 devices cannot be divided by tp*pp*cp = 5*1*1 = 5; use parallel.tp=4 or 6, or num_devices=45 or 50",
    ),
    "nodes_are_full": (["num_devices=12", "batch_size=12"], "num_devices", "use num_devices=8 or 16"),
    "tensor_groups_stay_in_a_node": (
        ["num_devices=48", "parallel.tp=3", "parallel.cp=2", "batch_size=8"],
        "parallel.tp",
        "tp*cp = 3*2 = 6 does not divide the 8 devices of a node",
    ),
    "experts_divide": (
        ["num_devices=4", "parallel.ep=3"],
        "parallel.ep",
        "= 1*1*4 = 4; use parallel.ep=2 or 4",
    ),
    "chunks_divide": (["parallel.vpp=2"], "parallel.vpp", "set parallel.pp > 1"),
    "offload_is_distributed": (
        ["optimizer.cpu_offload=true"],
        "optimizer.cpu_offload",
        "needs parallel.use_distributed_optimizer=true",
    ),
    "sequence_parallel_needs_tp": (["parallel.sequence_parallel=true"], "parallel.sequence_parallel", "or tp > 1"),
    "model_divides": (
        ["model.path=FOLDER", "num_devices=3", "parallel.tp=3", "batch_size=3"],
        "parallel.tp",
        "num_attention_heads=4 by parallel.tp=3, num_key_value_heads=2 by parallel.tp=3",
    ),
    "prompts_spread_over_ranks": (
        ["num_devices=8"],
        "batch_size",
        "batch_size=4 prompts cannot be spread over 8 data-parallel ranks (num_devices=8 / (tp*pp*cp = 1)): a rank "
        "takes whole prompts; use batch_size=8, or 4 devices",
    ),
    "updates_divide_the_batch": (
        ["stack.num_updates_per_batch=3", "algorithm.loss=ppo"],
        "stack.num_updates_per_batch",
        "use stack.num_updates_per_batch=2 or 4, or batch_size=3 or 6",
    ),
    "longest_sample_fits": (
        ["stack.micro_batch_tokens=1000"],
        "stack.micro_batch_tokens",
        "1024 + 64 = 1088 tokens, more than a micro-batch of 1000; use at least 1088",
    ),
    "warmup_ends": (["optimizer.warmup_steps=4"], "optimizer.warmup_steps", "= 3; use at most 3"),
    "training_samples_at_random": (["sampling.temperature=0"], "sampling.temperature", "expected a value > 0"),
    "one_temperature": (["algorithm.temperature=0.6"], "algorithm.temperature", "found 0.6, but samples are drawn at"),
    "whole_nucleus": (
        ["sampling.top_p=0.9"],
        "sampling.top_p",
        "wrong, unless sampling.replay_support=true, with a sampling.top_k, narrows the policy in the same way",
    ),
    "all_tokens": (["sampling.top_k=20"], "sampling.top_k", "found 20, expected -1"),
    "replayed_support_is_bounded": (
        ["sampling.top_p=0.9", "sampling.replay_support=true"],
        "sampling.top_k",
        "found -1, where the support of a token has no such bound; sampling.replay_support=true takes 2 to 1024",
    ),
    "fused_loss_is_of_the_vocabulary": (
        ["stack.loss_kernel=fused", "sampling.top_k=20", "sampling.replay_support=true"],
        "stack.loss_kernel",
        "found fused, which is of the whole vocabulary",
    ),
    "kl_has_a_reference": (["algorithm.kl_ctl=0.1"], "algorithm.kl_ctl", "set model.reference_path"),
    "fused_loss_is_of_tokens": (
        ["stack.loss_kernel=fused", "algorithm.loss=ppo", "algorithm.importance_sampling_level=sequence"],
        "stack.loss_kernel",
        "found fused, which has neither ratios of whole sequences (algorithm.importance_sampling_level=sequence)",
    ),
    "fused_loss_has_logits": (
        ["stack.loss_kernel=fused", "stack.logits_chunk_tokens=64"],
        "stack.loss_kernel",
        "found fused, which needs stored logits (stack.logits_chunk_tokens=64)",
    ),
    "drpo_updates_once": (
        ["stack.num_updates_per_batch=2"],
        "stack.num_updates_per_batch",
        "algorithm.allow_multi_update=true for disjoint mini-batches",
    ),
    "filter_is_known": (
        ["algorithm.dynamic_filter=zero_variance"],
        "algorithm.dynamic_filter",
        "found 'zero_variance', expected one of nonzero_variance, the dotted path of a callable, or null",
    ),
    "filter_has_rewards_to_compare": (
        ["algorithm.dynamic_filter=nonzero_variance", "sampling.num_samples=1"],
        "algorithm.dynamic_filter",
        "use 2 or more samples",
    ),
    "dynamic_batch_has_a_filter": (
        ["algorithm.dynamic_bs=true"],
        "algorithm.dynamic_bs",
        "without algorithm.dynamic_filter all groups are kept",
    ),
    "penalty_zone_fits": (
        ["reward.truncated_reward=soft", "reward.overlong_tokens=64"],
        "reward.overlong_tokens",
        "does not fit before sampling.max_new_tokens=64; use less than 64",
    ),
    "two_betas": (["optimizer.betas=[0.9]"], "optimizer.betas", "found 1 numbers, expected two"),
    "schedule_falls": (["optimizer.min_lr=1"], "optimizer.min_lr", "expected at most optimizer.lr=1e-06"),
    "greedy_evaluates_once": (["eval.temperature=0", "eval.num_samples=4"], "eval.num_samples", "found 4, expected 1"),
    "environment_is_known": (
        ["rollout.environment=calculater", "rollout.max_episode_tokens=100"],
        "rollout.environment",
        "the nearest is calculator",
    ),
    "episodes_end": (
        ["rollout.environment=calculator", "rollout.max_episode_tokens=63"],
        "rollout.max_episode_tokens",
        "found 63, expected at least the tokens of one turn, sampling.max_new_tokens=64",
    ),
    "episode_keys_have_an_environment": (
        ["rollout.rows=step", "rollout.max_episode_tokens=100"],
        "rollout.environment",
        "is null, and rollout.rows=step, rollout.max_episode_tokens would not be read",
    ),
    "turns_need_a_template": (
        ["data.chat_template=false", "rollout.environment=calculator", "rollout.max_episode_tokens=100"],
        "data.chat_template",
        "the observations of rollout.environment are chat messages",
    ),
    "episodes_keep_their_rewards": (
        ["reward.truncated_reward=zero", "rollout.environment=calculator", "rollout.max_episode_tokens=100"],
        "reward.truncated_reward",
        "with rollout.environment use keep",
    ),
    "turns_keep_their_rewards": (
        [
            "rollout.environment=calculator",
            "rollout.max_episode_tokens=100",
            "algorithm.gae={gae_lambda: 0.9}",
            "algorithm.reward_norm={mean_level: batch}",
        ],
        "algorithm.reward_norm",
        "algorithm.gae reads those of their turns",
    ),
    "steps_have_no_gae": (
        [
            "rollout.environment=calculator",
            "rollout.max_episode_tokens=100",
            "rollout.rows=step",
            "algorithm.gae={gae_lambda: 0.9}",
        ],
        "rollout.rows",
        "set it to episode, or algorithm.gae=null",
    ),
    "steps_share_an_advantage": (
        ["algorithm.step_adv_const_length=10"],
        "algorithm.step_adv_const_length",
        "found 10, which divides the advantage of the steps of rollout.rows=step",
    ),
    "model_exists": (["model.path=/no/where"], "model.path", "found '/no/where': no such folder"),
    "reference_exists": (
        ["model.reference_path=/no/where"],
        "model.reference_path",
        "found '/no/where': no such folder",
    ),
    "prompts_have_a_file": (["data.path=null"], "data.path", "is not set"),
    "prompts_exist": (["data.path=missing.jsonl"], "data.path", "found 'missing.jsonl': no such file"),
    "evaluation_prompts_exist": (["eval.path=missing.jsonl"], "eval.path", "found 'missing.jsonl': no such file; eval"),
    "evaluation_reads_its_file": (
        ["eval.path=FOLDER/config.json", "data.kind=reasoning_gym", "data.tasks={chain_sum: {}}", "data.path=null"],
        "eval.path",
        "is not read with data.kind=reasoning_gym, which makes its own held-out problems",
    ),
    "tasks_are_given": (["data.kind=reasoning_gym", "data.path=null"], "data.tasks", "needs at least one family"),
    "template_holds_the_prompt": (["data.prompt_template=hello"], "data.prompt_template", "that contains {prompt}"),
    "examples_are_messages": (
        ["data.example_messages=[{role: user, text: hi}]"],
        "data.example_messages",
        "message 0 has the keys role, text, expected role and content",
    ),
    "messages_need_a_template": (
        ["data.chat_template=false", "data.system_prompt=hi"],
        "data.chat_template",
        "set it to true",
    ),
    "critic_has_returns": (
        ["algorithm.critic={}"],
        "algorithm.critic",
        "without algorithm.gae has no returns to learn",
    ),
    "critic_can_know_the_rewards": (
        ["algorithm.critic={}", "algorithm.gae={}", "algorithm.reward_norm={mean_level: group}"],
        "algorithm.critic",
        "they depend on other samples, which the critic does not see; set algorithm.reward_norm=null",
    ),
    "critic_decides_what_is_trained": (
        ["algorithm.critic={}", "algorithm.gae={}", "algorithm.success_filter=true"],
        "algorithm.critic",
        "set algorithm.success_filter=false, or algorithm.critic=null",
    ),
    "tokens_are_not_left_out": (
        ["algorithm.gae={}", "algorithm.adv_norm.mean_leave1out=true"],
        "algorithm.adv_norm.mean_leave1out",
        "one token left out of their mean is no baseline",
    ),
    "critic_warmup_ends": (
        ["algorithm.critic={warmup_iterations: 3}", "algorithm.gae={}"],
        "algorithm.critic",
        "warmup_iterations=3 of num_iterations=3 train the critic alone",
    ),
    "critic_schedule": (
        ["algorithm.critic={optimizer: {warmup_steps: 4}}", "algorithm.gae={}"],
        "algorithm.critic",
        "optimizer.warmup_steps: found 4, but the critic makes 3 steps",
    ),
    "scorer_is_known": (["reward.scorer=math_boxd"], "reward.scorer", "the nearest is math_boxed"),
    "model_folder_has_a_config": (["model.path=DAMAGED"], "model.path", "its config.json is damaged: Expecting value"),
    "run_has_a_folder": (["run_dir="], "run_dir", "is empty: give the folder of the run"),
    "one_process_has_one_device": (
        ["cluster.mode=inprocess", "num_devices=2"],
        "cluster.mode",
        "found inprocess with num_devices=2: set cluster.mode=ray, or num_devices=1",
    ),
    "split_layout_has_both_sides": (
        [*SPLIT, "rollout.num_devices=4"],
        "rollout.num_devices",
        "found 4, expected 1 to 3 of num_devices=4",
    ),
    "split_layout_has_servers": (
        ["cluster.layout=split", "num_devices=4", "rollout.num_devices=2"],
        "cluster.layout",
        "found split with rollout.engine=native, which has no devices of its own; use sglang",
    ),
    "engines_fill_their_devices": (
        ["num_devices=16", "batch_size=16", "rollout.engine=sglang", "rollout.tp=3", "sync.mode=disk"],
        "rollout.tp",
        "engines of 3 devices do not fill 16 devices from device 0 of node 0 on, in nodes of 8",
    ),
    "address_is_given_in_full": (["cluster.address=auto"], "cluster.address", "found 'auto', expected host:port"),
    "weights_can_reach_the_engine": (["rollout.engine=sglang"], "sync.mode", "found inprocess, but SGLang servers"),
    "urls_are_urls": (["rollout.urls=[localhost]"], "rollout.urls", "found localhost, expected http://host:port"),
    "running_servers_take_no_options": (
        ["rollout.urls=['http://localhost:1']", "rollout.python=python3"],
        "rollout.urls",
        "are not launched with rollout.python",
    ),
    "shared_memory_is_of_one_machine": (
        ["sync.mode=tensor", "rollout.engine=sglang", "rollout.urls=['http://10.0.0.1:30000']"],
        "sync.mode",
        "http://10.0.0.1:30000 may be another machine, which shares no memory; use distributed",
    ),
    "ranks_wait_for_servers": (
        ["sync.mode=tensor", "rollout.engine=sglang", "cluster.timeout_s=500"],
        "sync.timeout_s",
        "found 600, which ranks wait for a server, but cluster.timeout_s=500: raise that",
    ),
    "memory_is_released_where_it_is_shared": (
        ["rollout.release_memory=true"],
        "rollout.release_memory",
        "found true with rollout.engine=native and cluster.layout=colocate; it is for sglang and colocate",
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_a_broken_rule_is_refused(rule, small, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2})
    )
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"model_type":')
    overrides, key, message = BROKEN[rule.check.__name__]
    places = {"FOLDER": str(tmp_path), "DAMAGED": str(tmp_path / "damaged")}
    overrides = [re.sub("FOLDER|DAMAGED", lambda name: places[name[0]], text) for text in overrides]
    with pytest.raises(ConfigError) as caught:
        small(*overrides, purpose="run")
    matching = [problem for problem in caught.value.problems if problem.startswith(f"{key}: ") and message in problem]
    assert len(matching) == 1, caught.value.problems
    assert [problem for problem in caught.value.problems if problem not in matching and not _is_run_only(problem)] == []


def _is_run_only(problem: str) -> bool:
    return "this version" in problem


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["algorithm.loss_agg_mode=seq-mean-token-sum-norm"], "algorithm.horizon: found null, expected a number > 0"),
        (["algorithm.loss=cispo"], "algorithm.eps_clip_higher: found None, expected a number > 0"),
        (
            ["data.kind=reasoning_gym", "data.tasks={chain_sum: {}}"],
            "data.path: is not read with data.kind=",
        ),
        (["data.tasks={chain_sum: {}}"], "data.tasks: is not read with data.kind=jsonl"),
        (
            ["reward.scorer=reasoning_gym"],
            "reward.scorer: reasoning_gym grades the problems of data.kind=",
        ),
        (["sync.mode=disk"], "sync.mode: found disk, but rollout.engine=native lives in the trainer's process"),
        (
            ["sync.mode=tensor", "rollout.engine=sglang", "num_devices=16", "batch_size=16"],
            "sync.mode: found tensor, but num_devices=16 are on several machines of devices_per_node=8",
        ),
        (
            [*SPLIT, "rollout.urls=['http://10.0.0.1:30000']"],
            "cluster.layout: found split with rollout.urls, whose servers have devices of their own; use colocate",
        ),
        (
            [*SPLIT, "rollout.num_servers=3"],
            "rollout.tp: found 1: 3 engines of 1 devices do not fit 2; at most 2 do",
        ),
        (["model.path=missing"], "model.path: found 'missing': no such folder"),
        (["rollout.environment=calculator"], "rollout.max_episode_tokens: is not set: an episode of"),
        (
            ["rollout.environment=calculator", "rollout.max_episode_tokens=20000"],
            "stack.micro_batch_tokens: the longest sample has data.max_prompt_tokens + rollout.max_episode_tokens = ",
        ),
        (
            ["num_devices=4", "parallel.tp=2", "parallel.pp=3"],
            "num_devices: 4 devices cannot be divided by tp*pp*cp = 2*3*1 = 6; use parallel.pp=2, or num_devices=6",
        ),
        (
            ["num_devices=2", "stack.num_updates_per_batch=4", "algorithm.loss=ppo"],
            "batch_size: batch_size=4 prompts in 4 updates of 1 cannot be spread over 2 data-parallel ranks",
        ),
    ],
)
def test_other_ways_to_break_a_rule(overrides, problem, small):
    with pytest.raises(ConfigError) as caught:
        small(*overrides, purpose="plan")
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(problem)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stack.num_updates_per_batch=2", "algorithm.allow_multi_update=true"],
        ["stack.num_updates_per_batch=4", "algorithm.loss=ppo"],
        ["optimizer.warmup_steps=3"],
        ["model.path=made/by/the/demo", "model.maker=package.module.make"],
        ["model.path=made/by/it", "model.maker=package.module.make", "model.reference_path=made/by/it"],
        ["model.reference_path=owner/other", "algorithm.kl_ctl=0.1", "algorithm.kl_coef=0.1"],
        ["algorithm.loss=ppo", "algorithm.use_decoupled_loss=true"],
        ["reward.scorer=package.module.Scorer"],
        ["stack.micro_batch_tokens=1088"],
        ["rollout.engine=sglang", "sync.mode=disk"],
        ["rollout.engine=sglang", "sync.mode=distributed", "num_devices=16", "batch_size=16"],
        [*SPLIT],
        [*SPLIT, "sync.mode=tensor"],
        ["rollout.engine=sglang", "sync.mode=tensor", "rollout.urls=['http://localhost:30000']"],
        ["rollout.engine=sglang", "sync.mode=distributed", "rollout.release_memory=true"],
        ["rollout.engine=sglang", "sync.mode=disk", "rollout.urls=['http://10.0.0.1:30000','http://[::1]:30000/']"],
        ["sampling.top_k=0"],
        ["sampling.top_k=20", "sampling.replay_support=true", "stack.logits_chunk_tokens=64"],
        ["sampling.top_k=1024", "sampling.top_p=0.9", "sampling.replay_support=true", "stack.share_prompts=true"],
        ["algorithm.dynamic_filter=package.module.judge", "sampling.num_samples=1"],
        ["algorithm.dynamic_filter=nonzero_variance", "algorithm.dynamic_bs=true"],
        ["algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.horizon=${sampling.max_new_tokens}"],
        ["cluster.address=10.0.0.1:6379"],
        ["cluster.address=node-3.cluster:6379"],
    ],
)
def test_what_the_rules_allow(overrides, small):
    small(*overrides)


def test_a_plan_may_go_beyond_this_version(small):
    config = small("num_devices=4", "rollout.engine=sglang", "cluster.mode=ray", "sync.mode=disk", purpose="plan")
    assert config.num_devices == 4


class Recorder:
    """A config that notes the dotted paths of the values that are read from it."""

    def __init__(self, section, prefix, read):
        self._section, self._prefix, self._read = section, prefix, read

    def __getattr__(self, name):
        value, path = getattr(self._section, name), f"{self._prefix}{name}"
        if dataclasses.is_dataclass(value):
            return Recorder(value, f"{path}.", self._read)
        self._read.add(path)
        return value


def test_rules_declare_the_keys_they_read(small):
    for overrides, _, _ in BROKEN.values():
        config = small(*overrides, purpose="print")
        for rule in RULES:
            read = set()
            rule.check(Recorder(config, "", read))
            undeclared = {path for path in read if not rule.reads(path)}
            assert not undeclared, rule.check.__name__
