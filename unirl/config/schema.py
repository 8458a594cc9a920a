"""The config schema: one dataclass per part of the system, every key with its doc and rule beside it.

Rules that involve one key stand in its declaration; rules between keys stand in `unirl.config.rules`. A default of
"???" means that the key must be given; "${...}" takes the value of another key.
"""

from dataclasses import dataclass
from typing import Any

from unirl.algorithms.config import GAEConfig, NormConfig, PolicyLossConfig, ValueLossConfig
from unirl.utils.keys import key

SCORERS = ("math_boxed", "math_verify", "reasoning_gym")
"""Built-in scorers, by the name that reward.scorer takes."""

GROUP_FILTERS = ("nonzero_variance",)
"""Built-in group filters, by the name that algorithm.dynamic_filter takes."""


@dataclass
class ModelConfig:
    path: str = key("???", "Hugging Face folder (or hub name) of the policy: config.json, tokenizer, safetensors.")
    maker: str | None = key(
        None,
        "Dotted path of a callable(path) that makes the folder where it does not exist (small models of the demos).",
    )
    reference_path: str | None = key(
        None,
        "Hugging Face folder (or hub name) of the frozen reference policy that KL terms compare with; may be "
        "model.path. Without a KL term the KL is only reported.",
    )
    dtype: str = key(
        "float32",
        "Dtype of weights and activations in training; master weights are always float32.",
        choices=["float32", "bfloat16"],
    )
    trust_remote_code: bool = key(False, "Let transformers run code that comes with the model or tokenizer.")


@dataclass
class DataConfig:
    kind: str = key("jsonl", "Where prompts come from.", choices=["jsonl", "reasoning_gym"])
    path: str | None = key(None, "JSON-lines file of prompts, one object a line (kind jsonl).")
    tasks: dict[str, Any] = key(
        factory=dict, doc="reasoning_gym families and their parameters, e.g. {chain_sum: {min_terms: 3}}."
    )
    size: int = key(10_000, "Training problems to make (kind reasoning_gym).", ge=1)
    heldout_size: int = key(256, "Held-out problems, disjoint from training (kind reasoning_gym).", ge=1)
    seed: int = key(0, "Seed of the problems and of the order in which prompts are drawn.", ge=0)
    shuffle: bool = key(True, "Draw prompts in a new seeded order each epoch; false keeps the file's order.")
    max_prompt_tokens: int = key(
        1024, "Longest prompt in tokens as sent, chat template included; longer ones are dropped and counted.", ge=1
    )
    system_prompt: str | None = key(None, "System message put before every prompt.")
    example_messages: list[dict[str, str]] = key(
        factory=list, doc="Chat messages {role, content} put before every prompt: worked examples."
    )
    prompt_template: str = key(
        "{prompt}", "Text sent for a prompt given as text; `{prompt}` stands for it, other braces are literal."
    )
    chat_template: bool = key(True, "Apply the tokenizer's chat template; false sends the bare text.")


@dataclass
class SamplingConfig:
    num_samples: int = key(8, "Samples per prompt: the size of a group.", ge=1)
    temperature: float = key(1.0, "Sampling temperature; 0 is refused in training.", ge=0)
    top_p: float = key(1.0, "Nucleus sampling threshold; 1 is off.", gt=0, le=1)
    top_k: int = key(-1, "Sample among the k likeliest tokens; -1 is off.", ge=-1)
    replay_support: bool = key(
        False, "Train with top_k and top_p: policies give log-probs among the tokens that were left to sample from."
    )
    max_new_tokens: int = key("???", "Longest response in tokens; longer ones are truncated.", ge=1)


ENVIRONMENTS = ("calculator",)
"""Built-in environments, by the name that rollout.environment takes."""


@dataclass
class RolloutConfig:
    engine: str = key("native", "Rollout engine.", choices=["native", "sglang"])
    num_devices: int | None = key(
        None, "Devices that sample, out of the root's num_devices (cluster.layout split).", ge=1
    )
    max_batch_size: int = key(1024, "Samples decoded at once by the native engine.", ge=1)
    python: str | None = key(
        None,
        "Interpreter of an environment with SGLang; null: $UNIRL_SGLANG_PYTHON, or that of `make sglang`.",
    )
    urls: list[str] = key(
        factory=list,
        doc="SGLang servers that run already, e.g. http://host:30000; their API key is taken from "
        "$UNIRL_SGLANG_API_KEY. Empty: servers are launched, on the devices of the run.",
    )
    num_servers: int | None = key(
        None, "SGLang servers to launch; null: as many as the devices that sample hold; without Ray, one.", ge=1
    )
    tp: int = key(1, "GPUs of a SGLang server.", ge=1)
    device: str = key(
        "auto", "Where SGLang servers run; auto: on CUDA where there is any.", choices=["auto", "cpu", "cuda"]
    )
    max_concurrency: int = key(256, "Samples that a SGLang server has at a time.", ge=1)
    mem_fraction: float | None = key(
        None, "Share of a device's memory for weights and cache; null: 0.3 on CPU, SGLang's choice on CUDA.", gt=0, lt=1
    )
    max_total_tokens: int | None = key(
        None, "Tokens in a SGLang server's cache; null: what mem_fraction leaves room for.", ge=1
    )
    deterministic: bool = key(
        True, "Samples of SGLang servers depend on their seeds alone; on CUDA that costs throughput."
    )
    release_memory: bool | None = key(
        None,
        "SGLang servers release the memory of weights and cache while the trainer computes (cluster.layout colocate); "
        "servers of rollout.urls need --enable-memory-saver. null: where a run on Ray launches them.",
    )
    server_args: dict[str, Any] = key(
        factory=dict, doc="Further options of SGLang servers, e.g. {chunked_prefill_size: 8192}."
    )
    timeout_s: float = key(600.0, "Seconds a sample may go without a token before its server counts as lost.", gt=0)
    start_timeout_s: float = key(600.0, "Seconds a SGLang server may take to start.", gt=0)
    health_interval_s: float = key(10.0, "Seconds of silence until a server is asked for a sign of life.", gt=0)
    health_timeout_s: float = key(60.0, "Seconds it has to give one before it is killed and restarted.", gt=0)
    max_restarts: int = key(3, "Restarts of a SGLang server between two weight syncs before it is given up.", ge=0)
    environment: str | None = key(
        None,
        f"Multi-turn episodes against {', '.join(ENVIRONMENTS)}, or the dotted path of a class with reset and step, "
        "which gives the rewards too; null: single-turn samples, graded by reward.scorer.",
    )
    environment_args: dict[str, Any] = key(factory=dict, doc="Arguments that the environment's class is made with.")
    max_turns: int = key(
        8, "Turns of the longest episode, of sampling.max_new_tokens each (with an environment).", ge=1
    )
    max_episode_tokens: int | None = key(
        None, "Tokens of the longest episode behind its prompt, observations counted; must be given.", ge=1
    )
    rows: str = key(
        "episode",
        "What the loss takes for one sequence (with an environment): an episode, or each of its steps, i.e. turns.",
        choices=["episode", "step"],
    )


@dataclass
class RewardConfig:
    scorer: str = key(
        "math_boxed",
        f"{', '.join(SCORERS)}, or the dotted path of a class with score(responses, answers).",
    )
    num_workers: int = key(2, "Scorer processes.", ge=1)
    timeout_s: float = key(
        10.0, "Seconds one answer may take to grade before it counts 0 and its worker is replaced.", gt=0
    )
    max_response_chars: int = key(200_000, "Longer responses are graded on their last so many characters.", ge=1)
    bias: float = key(0.0, "Added to every grade.")
    scale: float = key(1.0, "Then every grade is multiplied by this.")
    clip: float | None = key(None, "Then grades are clipped to [-clip, clip]; null: not at all.", gt=0)
    truncated_reward: str = key(
        "keep",
        "Reward of a truncated sample: keep the grade, zero it, or soft: subtract the overlong penalty.",
        choices=["keep", "zero", "soft"],
    )
    overlong_tokens: int = key(
        512, "Length of the soft penalty zone before max_new_tokens (truncated_reward soft).", ge=1
    )
    overlong_penalty_factor: float = key(1.0, "Penalty at max_new_tokens (truncated_reward soft).", ge=0)


@dataclass
class OptimizerConfig:
    lr: float = key(1e-6, "Peak learning rate.", gt=0)
    min_lr: float = key(0.0, "Learning rate at the end of a linear or cosine schedule.", ge=0)
    betas: list[float] = key(factory=lambda: [0.9, 0.999], doc="AdamW betas.", ge=0, lt=1)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0)
    weight_decay: float = key(0.01, "AdamW weight decay.", ge=0)
    schedule: str = key(
        "constant", "Learning-rate schedule after the warm-up.", choices=["constant", "linear", "cosine"]
    )
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", ge=0)
    cpu_offload: bool = key(
        False, "Hold master weights and moments in host memory and update them there (GPU only): saves GPU memory."
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    lr: float = key(1e-5, "Peak learning rate.", gt=0)


@dataclass
class CriticConfig(ValueLossConfig):
    path: str | None = key(
        None, "Hugging Face folder whose trunk the critic starts from; null: model.path. Same tokenizer."
    )
    warmup_iterations: int = key(0, "First iterations that train the critic alone.", ge=0)
    max_grad_norm: float = key(1.0, "Gradients of the critic are clipped to this global norm.", gt=0)
    optimizer: CriticOptimizerConfig = key(factory=CriticOptimizerConfig, doc="AdamW of the critic and its schedule.")


@dataclass
class AlgorithmConfig(PolicyLossConfig):
    temperature: float = key(
        "${sampling.temperature}", "Temperature of the log-probs in training; must be sampling.temperature."
    )
    adv_norm: NormConfig = key(
        factory=lambda: NormConfig(mean_level="group", std_level=None), doc="How rewards become advantages."
    )
    reward_norm: NormConfig | None = key(None, "Normalisation of rewards before that; null: none.")
    step_adv_const_length: float | None = key(
        None,
        "An episode's advantage is divided by this for each of its steps (rollout.rows step); null: by their number.",
        gt=0,
    )
    dynamic_filter: str | None = key(
        None,
        f"Train only on groups that this keeps: {', '.join(GROUP_FILTERS)} (rewards that are not all equal), or the "
        "dotted path of a callable(group: Part) -> bool; null keeps all.",
    )
    dynamic_bs: bool = key(
        False,
        "Draw batch_size prompts once and train on the groups that the filter leaves; false draws more prompts until "
        "batch_size groups are kept.",
    )
    max_sampling_rounds: int = key(
        10, "Rounds of at most batch_size prompts drawn in an iteration to fill the batch (dynamic_bs false).", ge=1
    )
    gae: GAEConfig | None = key(
        None, "Advantages of single tokens or turns by GAE; null: one advantage for a whole sample."
    )
    critic: CriticConfig | None = key(None, "Value model that GAE takes its values from; null: none, values are 0.")
    kl_ctl: float = key(0.0, "Weight of the KL to the reference policy in the reward.", ge=0)
    success_filter: bool = key(False, "Train on samples with a reward > 0 only (RAFT++).")
    allow_multi_update: bool = key(
        False,
        "Split a batch into stack.num_updates_per_batch disjoint mini-batches though the loss anchors its ratio "
        "on the rollout's own log-probs (DRPO).",
    )


@dataclass
class StackConfig:
    micro_batch_tokens: int = key(16_384, "Token budget of a micro-batch, prompt and response counted.", ge=1)
    num_updates_per_batch: int = key(
        1, "Optimizer steps per rollout batch, each on its own mini-batch of groups.", ge=1
    )
    share_prompts: bool = key(
        False, "Train on a prompt once for all its samples (own attention only, short responses)."
    )
    max_grad_norm: float = key(1.0, "Gradients are clipped to this global norm.", gt=0)
    recompute: str = key("none", "Activation recomputation.", choices=["none", "selective", "full"])
    loss_kernel: str = key(
        "auto",
        "From logits to the gradient in one kernel, or by log-probs and autograd; auto: fused where it has the loss.",
        choices=["auto", "fused", "separate"],
    )
    logits_chunk_tokens: int | None = key(
        None,
        "Response tokens whose logits exist at a time; saves memory, costs one more product with the head; null: all.",
        ge=1,
    )


@dataclass
class ParallelConfig:
    tp: int = key(1, "Tensor-parallel size.", ge=1)
    pp: int = key(1, "Pipeline-parallel size.", ge=1)
    cp: int = key(1, "Context-parallel size.", ge=1)
    ep: int = key(1, "Expert-parallel size.", ge=1)
    vpp: int | None = key(
        None,
        "Model chunks that a pipeline stage holds, for the interleaved schedule; null: one piece, scheduled 1F1B.",
        ge=2,
    )
    sequence_parallel: bool = key(False, "Shard activations along the sequence in TP groups.")
    use_distributed_optimizer: bool = key(
        False, "Split master weights and moments over the data-parallel ranks instead of holding them on each."
    )
    overlap_grad_reduce: bool = key(
        False, "Sum gradients over data-parallel ranks while the backward pass goes on, bucket by bucket."
    )
    deterministic: bool = key(
        False, "Deterministic kernels only: the same layout and seed give the same bits; slower on GPU."
    )
    timeout_s: float = key(1800.0, "Seconds after which a collective that a rank does not join fails.", gt=0)


@dataclass
class SyncConfig:
    mode: str = key(
        "inprocess",
        "How weights reach the rollout engine: native takes them in process; SGLang through shared memory (tensor), by "
        "broadcast (distributed) or through files (disk), see docs/weight_sync.md.",
        choices=["inprocess", "tensor", "disk", "distributed"],
    )
    folder: str | None = key(
        None,
        "Folder that weights pass through (mode disk), which servers can read; null: run_dir/weights.",
    )
    bucket_mb: int = key(
        128, "Size of a bucket of weights, in megabytes; tensor and distributed hold two at a time.", ge=1
    )
    timeout_s: float = key(600.0, "Seconds a server may take to load new weights, or a bucket of them.", gt=0)
    checksum_every: int = key(
        20, "Compare checksums of all weights with the servers' at the first sync and every so many; 0: never.", ge=0
    )


@dataclass
class CheckpointConfig:
    every: int = key(10, "Iterations between checkpoints; 0 saves only at the end and on Ctrl-C.", ge=0)
    keep: int = key(2, "Newest checkpoints kept.", ge=1)
    asynchronous: bool = key(
        True,
        "Go on training while a copy of the state is written; takes host memory for the copy, 12 bytes for each "
        "parameter over all ranks.",
    )


@dataclass
class EvalConfig:
    every: int = key(10, "Iterations between evaluations; 0 evaluates only before and after training.", ge=0)
    path: str | None = key(None, "JSON-lines file of evaluation prompts (kind jsonl); null: no evaluation.")
    num_samples: int = key(1, "Samples per evaluation prompt: the n of avg@n and the k of pass@k.", ge=1)
    temperature: float = key(1.0, "Sampling temperature in evaluation; 0 is greedy.", ge=0)
    max_new_tokens: int = key("${sampling.max_new_tokens}", "Longest response in evaluation.", ge=1)
    max_prompts: int | None = key(None, "Evaluate on the first so many prompts; null takes all.", ge=1)


@dataclass
class ClusterConfig:
    mode: str = key(
        "auto",
        "Models in the process of the command, or one process for each device, driven by Ray; auto: ray where "
        "num_devices is more than 1.",
        choices=["auto", "inprocess", "ray"],
    )
    address: str | None = key(
        None,
        "host:port of the Ray cluster of this job; null starts one on this machine, for the run alone. A cluster is "
        "never looked for.",
    )
    timeout_s: float = key(1800.0, "Seconds that a call to the workers may take before they count as hung.", gt=0)
    heartbeat_s: float = key(30.0, "Seconds within which a worker that is still busy must answer.", gt=0)
    max_restarts: int = key(10, "Times that lost workers are replaced in a run before it gives up.", ge=0)
    object_store_gb: float | None = key(
        None, "Size of the object store of a Ray that the run starts, in GB; null leaves it to Ray.", gt=0
    )
    layout: str = key(
        "colocate",
        "Train and sample on the same devices in turn, or split: rollout.num_devices sample, the others train.",
        choices=["colocate", "split"],
    )


@dataclass
class DebugConfig:
    mismatch_limit: float | None = key(
        0.1, "Mean difference of rollout and actor log-probs beyond which something is wrong; null: no limit.", gt=0
    )
    mismatch_action: str = key(
        "warn", "What to do beyond it: say so, or stop before the iteration is saved.", choices=["warn", "stop"]
    )
    worst_mismatches: int = key(1, "Samples with the largest mismatch written to samples.jsonl per iteration.", ge=0)


@dataclass
class LoggingConfig:
    samples_per_iteration: int = key(8, "Rollout samples written to samples.jsonl per iteration.", ge=0)
    trackers: list[str] = key(factory=list, doc="Extra metric sinks beside metrics.jsonl.", choices=["tensorboard"])


@dataclass
class TrainConfig:
    """Root of the config."""

    num_devices: int = key(1, "Devices of the job: GPUs, or CPU processes.", ge=1)
    devices_per_node: int = key(8, "Devices of one node.", ge=1)
    batch_size: int = key("???", "Prompts per iteration.", ge=1)
    num_iterations: int = key("???", "Iterations: rollout batches to train on.", ge=1)
    seed: int = key(0, "Seed of sampling; data.seed decides the prompts.", ge=0, lt=2**63)
    num_threads: int | None = key(
        None, "CPU threads of a process; null leaves it to torch. Tiny models are fastest with 1.", ge=1
    )
    run_dir: str = key("???", "Folder of the run: config, metrics, samples, checkpoints.")
    resume: str = key(
        "never",
        "auto continues from the newest checkpoint of run_dir where there is one; never starts anew.",
        choices=["auto", "never"],
    )
    model: ModelConfig = key(factory=ModelConfig, doc="The policy.")
    data: DataConfig = key(factory=DataConfig, doc="Training prompts.")
    sampling: SamplingConfig = key(factory=SamplingConfig, doc="How responses are drawn.")
    rollout: RolloutConfig = key(factory=RolloutConfig, doc="The engine that draws them.")
    reward: RewardConfig = key(factory=RewardConfig, doc="How responses are graded.")
    algorithm: AlgorithmConfig = key(factory=AlgorithmConfig, doc="Loss and advantages.")
    stack: StackConfig = key(factory=StackConfig, doc="Micro-batches and updates.")
    parallel: ParallelConfig = key(factory=ParallelConfig, doc="How the trainer is split.")
    optimizer: OptimizerConfig = key(factory=OptimizerConfig, doc="AdamW and its schedule.")
    sync: SyncConfig = key(factory=SyncConfig, doc="Weights from trainer to rollout engine.")
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig, doc="When to save.")
    eval: EvalConfig = key(factory=EvalConfig, doc="Evaluation.")
    cluster: ClusterConfig = key(factory=ClusterConfig, doc="Where processes run.")
    logging: LoggingConfig = key(factory=LoggingConfig, doc="What is written down.")
    debug: DebugConfig = key(factory=DebugConfig, doc="Alarms.")
