"""Weight sync by files: written once, read by every server. Needs nothing but a folder that the servers can read."""

import asyncio
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from unirl.rollout.sglang import RequestRefusedError, Server, ServerLostError, Update


class DiskTransfer:
    """Writes safetensors to a folder beside the last ones, renames it, and lets servers load it; a `WeightTransfer`.

    bucket_bytes: size of a file, and so of what is held in memory at a time. timeout_s: limit for a server to load.
    """

    keeps_weights = True

    def __init__(self, folder: Path, *, bucket_bytes: int, timeout_s: float):
        self._root = folder.absolute()
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._staged: Path | None = None
        self._version = 0

    def stage(self, update: Update) -> None:
        """See `WeightTransfer.stage`. A version stays on disk until the next one is complete."""
        version = update.version
        aside, target = self._root / f"version_{version}.part", self._root / f"version_{version}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            self._write(update.stream(), aside)
        except BaseException:
            shutil.rmtree(aside)
            raise
        shutil.rmtree(target, ignore_errors=True)  # of a run that used the folder before
        os.rename(aside, target)
        if self._staged is not None and self._staged != target:
            shutil.rmtree(self._staged)
        self._staged, self._version = target, version

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
        bucket: dict[str, torch.Tensor] = {}
        num_files = size = 0
        for name, tensor in weights:
            if bucket and size + tensor.nbytes > self._bucket_bytes:
                save_file(bucket, folder / f"model-{num_files:05d}.safetensors", {"format": "pt"})
                num_files, size = num_files + 1, 0
                bucket.clear()
            bucket[name] = tensor.cpu().contiguous()
            size += tensor.nbytes
        save_file(bucket, folder / f"model-{num_files:05d}.safetensors", {"format": "pt"})

    async def send(self, servers: Sequence[Server], *, flush: bool = True) -> list[Exception | None]:
        """See `WeightTransfer.send`; the servers read at the same time."""
        return list(await asyncio.gather(*(self._load(server, flush) for server in servers)))

    async def _load(self, server: Server, flush: bool) -> Exception | None:
        body = {"model_path": str(self._staged), "weight_version": str(self._version), "flush_cache": flush}
        try:
            await server.control.update_weights("disk", body, timeout_s=self._timeout_s)
        except (ServerLostError, RequestRefusedError) as error:
            return error
        return None

    def close(self) -> None:
        """See `WeightTransfer.close`."""
        if self._staged is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            self._staged = None
