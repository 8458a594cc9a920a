"""What --dry-run prints: where a config runs and how its batches divide."""

from rich.console import Console
from rich.table import Table

from unirl.config.geometry import Geometry, longest_response, placement, runs_on_ray
from unirl.config.rules import run_problems
from unirl.config.schema import TrainConfig


def print_summary(config: TrainConfig, console: Console) -> None:
    """Topology, batch geometry and evaluation of a valid config, and what in it this version cannot run yet."""
    geometry = Geometry.of(config)
    for title, rows in (
        ("Topology", _topology(config, geometry)),
        ("Batch geometry", _batch(config, geometry)),
        ("Evaluation", _evaluation(config)),
        ("Placement", _placement(config)),
    ):
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False
        )
        table.add_column(min_width=30, no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
        console.print()
    for problem in run_problems(config):
        console.print(f"planned only, a run is refused: {problem}")


def _topology(config: TrainConfig, geometry: Geometry) -> dict[str, str]:
    nodes = "1 node" if geometry.nodes == 1 else f"{geometry.nodes} nodes of {config.devices_per_node}"
    return {
        "devices": f"{geometry.devices} ({nodes})",
        "TP / PP / CP / EP / DP": f"{geometry.tp} / {geometry.pp} / {geometry.cp} / {geometry.ep} / {geometry.dp}",
        "processes": "one for each device, on Ray" if runs_on_ray(config) else "one",
        "model": f"{config.model.path} ({config.model.dtype})",
        "rollout engine": f"{config.rollout.engine}, weights by sync.mode={config.sync.mode}",
        "loss": f"{config.algorithm.loss}, {config.algorithm.loss_agg_mode}",
        **_episodes(config),
    }


def _placement(config: TrainConfig) -> dict[str, str]:
    if not runs_on_ray(config):
        return {"everything": "this process"}
    return dict(line.split(": ", 1) for line in placement(config).lines())


def _episodes(config: TrainConfig) -> dict[str, str]:
    rollout, turn = config.rollout, config.sampling.max_new_tokens
    if rollout.environment is None:
        return {}
    return {
        "episodes": (
            f"{rollout.environment}, at most {rollout.max_turns} turns of {turn:,} new tokens and "
            f"{rollout.max_episode_tokens:,} tokens behind the prompt; one sequence per {rollout.rows}"
        )
    }


def _batch(config: TrainConfig, geometry: Geometry) -> dict[str, str]:
    sampling = config.sampling
    return {
        "prompts per iteration": _prompts(config, geometry),
        "group filter": config.algorithm.dynamic_filter or "none, all groups are kept",
        "samples per iteration": f"{geometry.samples} ({geometry.prompts} prompts x {sampling.num_samples} samples)",
        "samples per DP rank": f"{geometry.samples_per_dp_rank}",
        "longest sample": (
            f"{geometry.longest_sample:,} tokens ({config.data.max_prompt_tokens:,} prompt + "
            f"{longest_response(config):,} new)"
        ),
        "micro-batch token budget": f"{geometry.micro_batch_tokens:,}",
        "optimizer steps per iteration": f"{geometry.steps_per_iteration} of {geometry.prompts_per_step} prompts",
        "iterations": f"{config.num_iterations}",
        "total optimizer steps": f"{geometry.total_steps}",
        "learning rate": (
            f"{config.optimizer.lr:g}, {config.optimizer.schedule}, {config.optimizer.warmup_steps} warm-up steps"
        ),
    }


def _prompts(config: TrainConfig, geometry: Geometry) -> str:
    algorithm = config.algorithm
    if algorithm.dynamic_filter is None:
        return f"{geometry.prompts}"
    if algorithm.dynamic_bs:
        return f"{geometry.prompts} sampled, up to {geometry.prompts} kept"
    rounds = algorithm.max_sampling_rounds
    return f"{geometry.prompts} kept, up to {geometry.max_prompts_drawn} sampled (at most {rounds} rounds)"


def _evaluation(config: TrainConfig) -> dict[str, str]:
    if config.data.kind == "jsonl" and config.eval.path is None:
        return {"none": "eval.path is not set"}
    source = config.eval.path or f"{config.data.heldout_size} held-out problems of {', '.join(config.data.tasks)}"
    every = f", every {config.eval.every} iterations" if config.eval.every else ""
    return {
        "prompts": source if config.eval.max_prompts is None else f"{source} (the first {config.eval.max_prompts})",
        "when": f"before{every} and after training",
        "samples per prompt": f"{config.eval.num_samples} at temperature {config.eval.temperature:g}",
        "longest response": f"{config.eval.max_new_tokens:,} tokens",
    }
