"""`ARTrainer`: synchronous training of an autoregressive policy. `_train_iteration` is the whole method."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from unirl.algorithms import make_algorithm
from unirl.cluster.models import TrainedProxy
from unirl.config.geometry import releases_memory
from unirl.config.schema import TrainConfig
from unirl.errors import UserError
from unirl.observe.console import RunDisplay
from unirl.observe.run_dir import RunDirectory
from unirl.observe.trackers import make_trackers
from unirl.sync import WeightSync
from unirl.train.checkpoint import CheckpointStore
from unirl.train.critic import CriticTrainer
from unirl.train.log_prob_pass import log_prob_pass
from unirl.train.stack import TrainStack
from unirl.trainer.advantages import advantage_metrics, estimate_advantages, training_rows
from unirl.trainer.collect import Collector
from unirl.trainer.evaluate import evaluate
from unirl.trainer.group_filter import load_group_filter
from unirl.trainer.interrupt import StopRequested, StopSignal
from unirl.trainer.mismatch import Mismatch, alarm
from unirl.trainer.report import batch_metrics, readable_samples
from unirl.trainer.setup import load_data, make_engine, make_models, make_reward, prepare_model
from unirl.trainer.token_advantages import check_gae
from unirl.types import Part, SamplingParams


@dataclass
class TrainerState:
    """What a checkpoint holds beside the actor. Random streams derive from `seed` and these counters alone."""

    sampler: dict[str, int]
    prompts: str
    """Fingerprint of the training prompts: the sampler's position means nothing among others."""
    iteration: int = 0
    next_sample_id: int = 0
    unwritten: dict[str, Any] | None = None
    """Metrics of an iteration that has trained but whose evaluation and line in metrics.jsonl are still to come."""


class ARTrainer:
    """Rollout, grading, advantages, update, weight sync, evaluation: iteration after iteration.

    Everything that can be refused is refused here or in the config's validation, before the first iteration.
    """

    def __init__(self, config: TrainConfig, config_yaml: str, stop: StopSignal | None = None):
        """stop: entered by who makes the trainer; None: signals do what they do otherwise."""
        self.config = config
        group_filter = load_group_filter(config.algorithm.dynamic_filter)
        if config.algorithm.gae is not None:
            check_gae(config.algorithm.gae)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.display = RunDisplay(config.num_iterations)
        self.stop = stop or StopSignal()
        self._config_yaml = config_yaml
        with ExitStack() as resources:
            self.run = resources.enter_context(RunDirectory(config.run_dir, resume=config.resume))
            self.checkpoints = CheckpointStore(self.run.checkpoints_path, keep=config.checkpoint.keep)
            prepare_model(config.model, self.display.message)
            data = load_data(config, self.display.message)
            self.tokenizer, self.train_prompts, self.eval_prompts = data.tokenizer, data.train, data.heldout
            self.sampler, self.stop_token_ids = data.sampler, data.stop_token_ids
            self.trackers = make_trackers(config.logging.trackers, self.run.path)
            for tracker in self.trackers:
                resources.callback(tracker.close)
            self.reward = resources.enter_context(make_reward(config))
            models = make_models(config, self.display.message)
            resources.callback(models.workers.close)
            self.actor, self.critic, self.reference = models.actor, models.critic, models.reference
            self.engine = make_engine(config, models.workers)
            resources.callback(self.engine.close)
            if config.rollout.engine == "sglang":
                self.engine.open_pool(self.run.path / "pool")
            self.collector = Collector(config, data, self.engine, self.reward, group_filter)
            self._resources = resources.pop_all()
        self.stack = TrainStack(
            self.actor,
            make_algorithm(config.algorithm),
            config.stack,
            allow_multi_update=config.algorithm.allow_multi_update,
            critic=self.critic and CriticTrainer(self.critic, config.algorithm.critic, config.stack),
        )
        self.sync = WeightSync(self.actor.weights, self.engine)

    def fit(self) -> int:
        """Train until `num_iterations`, or until a stop. Returns the process's exit code: 0, or 130 when stopped."""
        with self._resources, self.display:
            self._start()
            try:
                self._finish_iteration()
                while self.state.iteration < self.config.num_iterations:
                    self._train_iteration()
                    self._finish_iteration()
            except StopRequested:
                self._save_last()
                self.display.message(
                    f"stopped after iteration {self.state.iteration} and saved; "
                    "continue with the same command and resume=auto"
                )
                return 130
            self._save_last()
            policy = self._export()
            self.display.message(f"done: the run is in {self.run.path}, the trained policy in {policy}")
        return 0

    def _train_iteration(self) -> None:
        config, iteration, started = self.config, self.state.iteration, time.perf_counter()
        with self.stop.abandonable():
            batch = self.collector.collect(iteration, self.state.next_sample_id, self.display)
            if releases_memory(config):
                self.engine.release_memory()  # until the sync takes it again
            with self.display.phase("reference") as reference:
                part = self._with_reference(batch.part)
            with self.display.phase("values") as values:
                part = self.stack.with_values(part)
            part = estimate_advantages(part, config.algorithm)
        with self.display.phase("train") as train:
            rows = training_rows(part, config)
            update = self.stack.train_track(rows, train_policy=not self._critic_warms_up())
            mismatch = Mismatch.of(rows, self.stack.replay_logp)
            self._heed(mismatch.metrics())
        with self.display.phase("sync") as sync:
            self.sync.publish(iteration + 1)

        metrics = {
            **batch.metrics,
            **self.engine.metrics(),
            **batch_metrics(batch.drawn),
            **advantage_metrics(part, config.algorithm),
            **update,
            **mismatch.metrics(),
            **batch.seconds,
            "time/reference": reference.seconds,
            "time/values": values.seconds,
            "time/train": train.seconds,
            "time/sync": sync.seconds,
            "time/iteration": time.perf_counter() - started,
        }
        metrics["tokens_per_second"] = batch.drawn.text.tokens.numel() / metrics["time/iteration"]
        self._write_samples(iteration + 1, batch.drawn)
        self._write_mismatches(iteration + 1, rows, mismatch)
        self.state = TrainerState(
            self.sampler.state_dict(),
            self.state.prompts,
            iteration + 1,
            next_sample_id=self.state.next_sample_id + len(batch.drawn),
            unwritten=metrics,
        )

    def _heed(self, mismatch: dict[str, float]) -> None:
        """Raises UserError where the mismatch is to stop the run: nothing of this iteration is published or saved."""
        message = alarm(mismatch, self.config.debug)
        if message is not None and self.config.debug.mismatch_action == "stop":
            raise UserError(f"iteration {self.state.iteration + 1}: {message}")
        if message is not None:
            self.display.message(f"iteration {self.state.iteration + 1}: {message}")

    def _write_mismatches(self, iteration: int, part: Part, mismatch: Mismatch) -> None:
        """The samples on which engine and actor differ most, as further lines of samples.jsonl."""
        for position, mean, largest in mismatch.worst(self.config.debug.worst_mismatches):
            marks = {"worst_mismatch": True, "logp_absdiff_mean": mean, "logp_absdiff_max": largest}
            self._write_samples(iteration, part.select(torch.tensor([position])), **marks)

    def _critic_warms_up(self) -> bool:
        return self.critic is not None and self.state.iteration < self.config.algorithm.critic.warmup_iterations

    def _with_reference(self, part: Part) -> Part:
        """The part with the reference policy's log-probs, where there is one."""
        if self.reference is None:
            return part
        return replace(part, ref_logp=log_prob_pass(self.reference, part, self.config.stack))

    def _finish_iteration(self) -> None:
        """Evaluate where it is due, write the iteration's line, save where it is due."""
        iteration, metrics = self.state.iteration, self.state.unwritten
        if metrics is None:
            return
        if self._due(self.config.eval.every, at_start=True) and self.eval_prompts:
            with self.stop.abandonable():
                metrics = {**metrics, **self._evaluate()}
        if metrics:
            self.run.write_metrics(iteration, metrics)
            self.display.show(iteration, metrics)
            for tracker in self.trackers:
                tracker.log(iteration, metrics)
        self.state.unwritten = None
        with self._going_on():
            self.checkpoints.publish()
        if self._due(self.config.checkpoint.every, at_start=False) and iteration < self.config.num_iterations:
            self._save()

    def _due(self, every: int, *, at_start: bool) -> bool:
        """Whether something done every so many iterations (0: never) and at the last one comes now."""
        iteration = self.state.iteration
        if iteration == 0:
            return at_start
        return iteration == self.config.num_iterations or (every > 0 and iteration % every == 0)

    def _evaluate(self) -> dict[str, float]:
        config = self.config.eval
        with self.display.phase("eval", len(self.eval_prompts) * config.num_samples) as phase:
            metrics, part = evaluate(
                self.collector.workflow,
                self.eval_prompts,
                params=SamplingParams(
                    config.max_new_tokens, temperature=config.temperature, stop_token_ids=self.stop_token_ids
                ),
                num_samples=config.num_samples,
                seed=self.config.seed,
                grade=self.collector.grade,
                on_progress=phase.update,
            )
        self._write_samples(self.state.iteration, part, eval=True)
        return {**metrics, "time/eval": phase.seconds}

    def _write_samples(self, iteration: int, part: Part, **marks: bool) -> None:
        samples = readable_samples(part, self.tokenizer, self.config.logging.samples_per_iteration)
        self.run.write_samples(iteration, (marks | sample for sample in samples))

    def _start(self) -> None:
        """Take up the newest checkpoint, or start at iteration 0, and give the engine the actor's weights."""
        self.state = TrainerState(self.sampler.state_dict(), self.train_prompts.fingerprint(), unwritten={})
        if self.config.resume == "auto":
            saved = self.checkpoints.load_newest(self._trained_models(), self.display.message)
            if saved is None:
                self.display.message(f"{self.checkpoints.path} holds no checkpoint: starting at iteration 0")
            else:
                self._take_up(saved)
        # Only now: a resumption that is refused leaves the run's files as they were.
        changes = self.run.write_config(self._config_yaml)
        if changes and self.state.iteration:
            self.display.message(f"the config has changed since: {'; '.join(changes)}")
        unfinished = self.state.unwritten is not None
        for lost in self.run.trim(trained=self.state.iteration, finished=self.state.iteration - unfinished):
            self.display.message(lost)
        self.sync.publish(self.state.iteration)

    def _take_up(self, values: dict[str, Any]) -> None:
        """Raises UserError where the run was another one."""
        if differing := values.keys() ^ {item.name for item in fields(TrainerState)}:
            raise UserError(
                f"run_dir={self.run.path} was saved by another version of unirl (state.json differs in "
                f"{', '.join(sorted(differing))}): go on with that version, or start another run_dir"
            )
        saved = TrainerState(**values)
        if saved.prompts != self.state.prompts:
            raise UserError(
                f"run_dir={self.run.path} was trained on other prompts than those that data.* names now: give the "
                "same data (and tokenizer) to resume, or start another run_dir"
            )
        if saved.iteration > self.config.num_iterations:
            raise UserError(
                f"num_iterations={self.config.num_iterations}, but run_dir={self.run.path} has done {saved.iteration}: "
                "give more to go on, or start another run_dir"
            )
        self.sampler.load_state_dict(saved.sampler)
        self.state = saved
        self.display.message(f"resumed after iteration {saved.iteration}")

    def _save(self) -> None:
        """Save, or start to; the run goes on where that fails."""
        with self._going_on():
            self.checkpoints.finish()
        with self._going_on():
            save = self.checkpoints.begin if self.config.checkpoint.asynchronous else self.checkpoints.save
            save(self.state.iteration, asdict(self.state), self._trained_models())

    def _save_last(self) -> None:
        """Save, and wait for it. Raises UserError where that fails."""
        with self._going_on():
            self.checkpoints.finish()
        self.checkpoints.save(self.state.iteration, asdict(self.state), self._trained_models())

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """A checkpoint that could not be written is told, and the run goes on: the next one may be."""
        try:
            yield
        except UserError as error:
            self.display.message(f"{error}; training goes on")

    def _export(self) -> Path:
        policy = self.run.path / "policy"
        shutil.rmtree(policy, ignore_errors=True)  # of the same run when it had fewer iterations
        try:
            self.actor.export_hf(policy)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
            raise UserError(
                f"the trained policy could not be written to {policy}: {error}; make room and give the same command "
                "with resume=auto: the training itself is saved"
            ) from error
        return policy

    def _trained_models(self) -> dict[str, TrainedProxy]:
        """The models of a checkpoint, by the name of their folder in it."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic is not None else {})
