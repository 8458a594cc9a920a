"""A real actor that dies, or stops, at a given point of its work."""

import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from tests.train.megatron.conftest import weighted_loss
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.manifest import FileSum
from unirl.train.megatron.actor import MegatronActor


@dataclass(frozen=True)
class Faults:
    """Files in `folder` that say what is to happen to which rank, once."""

    folder: Path

    def plan(self, where: str, rank: int, how: signal.Signals | Exception | Literal["node"]) -> None:
        """A signal that the rank gets, an error that it raises, or its node is lost."""
        (self.folder / f"{where}-{rank}").write_bytes(pickle.dumps(how))

    def planned(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def strike(self, where: str) -> None:
        path = self.folder / f"{where}-{dist.get_rank() if dist.is_initialized() else 0}"
        if path.exists():
            how = pickle.loads(path.read_bytes())
            path.unlink()
            if isinstance(how, Exception):
                raise how
            if how == "node":
                os.kill(os.getppid(), signal.SIGKILL)  # its raylet
            else:
                os.kill(os.getpid(), how)
            time.sleep(60)  # another thread may take the signal first: this one must not go on until it has


@dataclass(frozen=True)
class StrikingLoss:
    """`weighted_loss`, between the forward and the backward pass of which a fault may strike, or in the latter."""

    faults: Faults

    def __call__(self, batch, logp, entropy):
        self.faults.strike("forward")
        if logp.requires_grad:
            logp.register_hook(lambda gradient: self.faults.strike("backward"))
        return weighted_loss(batch, logp, entropy)


@dataclass(frozen=True)
class FailingLoss:
    """Fails on every rank."""

    def __call__(self, batch, logp, entropy):
        raise ArithmeticError(f"no loss for {logp.numel()} tokens")


class FaultyActor(MegatronActor):
    faults: Faults

    def log_probs(self, micro_batches):
        found = super().log_probs(micro_batches)
        self.faults.strike("log_probs")
        return found

    def optimizer_step(self):
        result = super().optimizer_step()
        self.faults.strike("optimizer")  # when other ranks have stepped, and this one, too
        return result

    def save(self, folder: Path) -> dict[str, FileSum]:
        begun = folder / f"begun-{dist.get_rank()}"
        begun.touch(exist_ok=False)
        self.faults.strike("save")
        begun.unlink()
        return super().save(folder)

    def export_weights(self):
        for number, weight in enumerate(super().export_weights()):
            if number == 3:
                self.faults.strike("sync")
            yield weight


@dataclass(frozen=True)
class MakeModels:
    """The models of a rank: one actor."""

    folder: Path
    faults: Faults
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __call__(self) -> dict[str, FaultyActor]:
        actor = FaultyActor(
            ModelConfig(path=str(self.folder)),
            parallel=self.parallel,
            optimizer=OptimizerConfig(lr=1e-2),
            stack=StackConfig(),
            temperature=1.0,
            total_steps=10,
            seed=0,
        )
        actor.faults = self.faults
        return {"actor": actor}
