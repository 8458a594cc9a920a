"""Servers on the nodes of a Ray cluster: a small actor beside each starts it, watches it, and takes it along."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from unirl.cluster.berth import Hosted, HostLostError, MakeProcess
from unirl.cluster.crew import Crew
from unirl.cluster.network import use_interface_of_node
from unirl.cluster.placement import EngineSeat, shares_devices
from unirl.cluster.processes import kill_process
from unirl.cluster.reservation import Reservation

_COME_UP_S = 300.0
_MOVE_S = 30.0
"""How long Ray has to find another node for the devices of a lost one."""
_LAUNCH_S = 180.0
"""To start a process, which is not to wait until it serves; the host may have to import torch first."""
_END_S = 60.0
_ANSWER_S = 10.0
_POLL_S = 0.5
_ATTEMPTS, _PAUSE_S = 4, 3.0


@dataclass(frozen=True)
class HostPlace:
    """Where a host runs. devices: those that Ray has given it, ascending; none where it is to share others'."""

    node_id: str
    node_ip: str
    interface: str
    devices: tuple[int, ...]
    pid: int
    started: float

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.node_ip} ({self.interface})"


class Host:
    """A Ray actor that hosts one process after the other. What it hosts ends with it, however that happens."""

    def __init__(self, directory: str, environment: Mapping[str, str]):
        """directory, environment: those of the driver, so that relative paths and settings mean the same here."""
        os.chdir(directory)
        os.environ.update(environment)
        self._interface = use_interface_of_node()
        self._process: Hosted | None = None

    def place(self) -> HostPlace:
        """Where this host runs."""
        context, process = ray.get_runtime_context(), psutil.Process()
        return HostPlace(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            interface=self._interface,
            devices=tuple(sorted(int(device) for device in ray.get_gpu_ids())),
            pid=process.pid,
            started=process.create_time(),
        )

    def launch(self, make: MakeProcess, devices: tuple[int, ...]) -> tuple[str, str, int]:
        """URL, API key and process id of a new process, which takes the place of the one before."""
        self.end()
        self._process = make(ray.util.get_node_ip_address(), devices)
        return self._process.url, self._process.api_key, self._process.pid

    def wait(self) -> str:
        """The end of the process's log, once that has ended."""
        process = self._process
        while process.is_running():
            time.sleep(_POLL_S)
        return process.log_tail()

    def log_tail(self) -> str:
        return self._process.log_tail()

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()


class RayBerth:
    """A `Berth` on a node of a reservation; its host is hired anew where it was lost.

    place: of its host, while there is one. num_devices: how many it takes. shared: those of others that it is to use;
    None: it takes its own of the reservation. arguments: of `Host`.
    """

    def __init__(
        self,
        reservation: Reservation,
        node: int,
        *,
        num_devices: int,
        shared: Callable[[], tuple[int, ...]] | None,
        arguments: tuple[Any, ...],
    ):
        self.node = node
        self.place: HostPlace | None = None
        self._reservation = reservation
        self._num_devices = num_devices
        self._shared = shared
        self._arguments = arguments
        self._actor: Any = None

    def __str__(self) -> str:
        return f"{self.place or 'no host'}, devices {', '.join(map(str, self.devices()))}"

    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices on their node; none while there is no host."""
        if self._shared is not None:
            return self._shared()
        return self.place.devices if self.place else ()

    def hire(self) -> ray.ObjectRef:
        """Ask Ray for a host; the reference of its place, for `settle`."""
        self._actor = (
            ray.remote(Host)
            .options(
                num_cpus=0,
                num_gpus=0 if self._shared is not None else self._num_devices,
                max_concurrency=8,  # one thread waits for the end of the process
                max_restarts=0,
                scheduling_strategy=self._reservation.on(self.node),
            )
            .remote(*self._arguments)
        )
        return self._actor.place.remote()

    def settle(self, place: ray.ObjectRef) -> None:
        """Wait until the host is there. Raises HostLostError where it does not come up."""
        self.place = self._ask(place, _COME_UP_S)

    def launch(self, make: MakeProcess) -> "HostedProcess":
        """See `Berth.launch`."""
        if self._actor is None:
            self._hire_anew()
        devices, actor = self.devices(), self._actor
        url, api_key, pid = self._ask(actor.launch.remote(make, devices), _LAUNCH_S)
        is_here = self.place.node_id == ray.get_runtime_context().get_node_id()
        return HostedProcess(self, actor, url, api_key, pid, devices if is_here else ())

    def _hire_anew(self) -> None:
        for attempt in range(_ATTEMPTS):
            if not self._reservation.wait([self.node], _MOVE_S):
                raise HostLostError(
                    f"its node is lost, and within {_MOVE_S:.0f} s no other had {self._num_devices} devices free"
                )
            try:
                self.settle(self.hire())
                return
            except HostLostError:
                # A host may be known to be lost before its node is.
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the host, with what it hosts, and give its devices back; `launch` hires another."""
        if self._actor is not None:
            self.leave(self._actor)

    def leave(self, actor: Any) -> None:
        """End the host, with what it hosts, unless another has taken its place already."""
        if actor is not self._actor:
            return
        self._actor, place = None, self.place
        self.place = None
        ray.kill(actor, no_restart=True)
        if place is not None:  # Ray asks the process itself first, which a stopped one does not hear
            kill_process(place.node_id, place.pid, place.started)

    def _ask(self, reference: ray.ObjectRef, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except RayTaskError:
            raise  # the host lives
        except RayError as error:
            lost = HostLostError(f"its host, {self.place or 'which was not up yet'}, is lost: {_first_line(error)}")
            self.leave(self._actor)
            raise lost from error


class HostedProcess:
    """A process that a host has started, seen from the driver; a `Hosted`."""

    def __init__(self, berth: RayBerth, actor: Any, url: str, api_key: str, pid: int, gpus: tuple[int, ...]):
        self.url = url
        self.api_key = api_key
        self.pid = pid
        self.gpus = gpus
        self._berth = berth
        self._actor = actor
        self._end = actor.wait.remote().future()

    def is_running(self) -> bool:
        """Not where its host is lost either: it has ended with that."""
        return not self._end.done()

    def log_tail(self) -> str:
        """See `Hosted.log_tail`; where the host is lost, how."""
        try:
            return self._end.result() if self._end.done() else ray.get(self._actor.log_tail.remote(), timeout=_ANSWER_S)
        except RayError as error:
            return f"its host is lost: {_first_line(error)}"

    def kill(self) -> None:
        """See `Hosted.kill`; with its host where that does not answer."""
        try:
            ray.get(self._actor.end.remote(), timeout=_END_S)
        except RayTaskError:
            raise
        except RayError:
            self._berth.leave(self._actor)


def open_berths(
    engines: Sequence[EngineSeat], crew: Crew, reservation: Reservation, arguments: tuple[Any, ...]
) -> list[RayBerth]:
    """One for each engine, in their order, each with a host. arguments: of `Host`."""
    berths = [_berth(engine, crew, reservation, arguments) for engine in engines]
    hired = [(berth, berth.hire()) for berth in berths]
    for berth, place in hired:
        berth.settle(place)
    return sorted(berths, key=lambda berth: (berth.node, berth.devices()))


def _berth(engine: EngineSeat, crew: Crew, reservation: Reservation, arguments: tuple[Any, ...]) -> RayBerth:
    devices = partial(crew.devices, engine.node, engine.devices)
    shared = devices if shares_devices(engine, crew.bundles) else None
    return RayBerth(reservation, engine.node, num_devices=len(engine.devices), shared=shared, arguments=arguments)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
