"""Local processes that form one gloo process group, for audits and tests."""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

_HOST = "127.0.0.1"


class RankError(RuntimeError):
    """A rank failed, died or was not done in time; the message names it."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """`function(*args)` on `world_size` fresh processes with a default gloo group; the results by rank.

    `function` is importable by name; it, the arguments and the results are pickled. Each process computes with one
    thread. All processes are gone when this returns. Raises RankError with the traceback of the first rank that failed,
    or with the ranks that were not done after `timeout_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, rank, world_size, store.port, timeout_s, function, args),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the death of the process closes the pipe
            processes.append(process)
            pipes.append(ours)
        return _collect(processes, pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    open_ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: dict[int, Any] = {}
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(map(str, sorted(open_ranks.values())))
            raise RankError(f"rank {missing} of {len(processes)} not done after {timeout_s:.0f} s")
        for pipe in ready:
            rank = open_ranks.pop(pipe)
            try:
                failure, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                failure = f"the process died (exit code {processes[rank].exitcode})"
            if failure:
                raise RankError(f"rank {rank} of {len(processes)}: {failure}")
    return [results[rank] for rank in range(len(processes))]


def _rank_main(pipe: Connection, rank: int, world_size: int, port: int, timeout_s: float, function, args) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = dist.TCPStore(_HOST, port, is_master=False)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        _send(pipe, None, function(*args))
    except Exception:  # noqa: BLE001 (whatever it is, the caller is told)
        _send(pipe, traceback.format_exc(), None)
    finally:
        dist.destroy_process_group()


def _send(pipe: Connection, failure: str | None, result: Any) -> None:
    # Pickled here: by the pipe's own pickler tensors would stay in memory of this process, which ends now.
    pipe.send_bytes(pickle.dumps((failure, result)))
