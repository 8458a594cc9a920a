"""The Ray of a run: one of its own on this machine, or the cluster that the job has started."""

import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader

from unirl.cluster.codec import send_tensors_as_numpy
from unirl.errors import UserError

_PREFIX = "unirl-ray-"

_RECONNECT_S = 600
"""Ray ends a driver that has lost the head for so long without a word; `check` finds that out before."""

_GO_ON = "once it is up again, with its nodes, continue with resume=auto"

_LIGHT = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class RaySession(AbstractContextManager):
    """A connection to Ray; at its end everything that it started is gone.

    address: host:port of a cluster to join, whose token RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH holds; None starts one on
    this machine with `num_devices` devices, on loopback, with a token and a folder that only this user can read.

    A running cluster is never looked for: neither the address "auto" nor RAY_ADDRESS is used.
    """

    def __init__(self, address: str | None, *, num_devices: int, object_store_gb: float | None = None):
        if ray.is_initialized():
            raise RuntimeError("this process is connected to Ray already: one run at a time")
        if "RAY_AUTH_MODE" not in os.environ:  # else `unirl.cluster` has set it
            raise RuntimeError("ray was imported before unirl.cluster: set RAY_AUTH_MODE=token in the environment")
        self._head = "the Ray of this run" if address is None else f"the head of the Ray cluster {address}"
        self._folder: Path | None = None
        self._environment: dict[str, str | None] = {}
        try:
            with _sigterm_as_it_is():
                if address is None:
                    self._start(num_devices, object_store_gb)
                else:
                    self._join(address)
            self._raylet = _raylet()
        except BaseException:
            self.close()
            raise
        send_tensors_as_numpy()

    def close(self) -> None:
        """Leave, or end what was started; may be called twice."""
        ray.shutdown()
        for name, before in self._environment.items():
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before
        self._environment = {}
        if self._folder is not None:
            ray_constants.ENABLE_RAY_CLUSTER = True
            _end_those_of(self._folder)  # at once, also of a Ray that was interrupted while it started
            shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _start(self, num_devices: int, object_store_gb: float | None) -> None:
        _remove_stale_folders()
        self._folder = Path(
            tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        )  # short, as socket names are; mode 0700
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        self._set_environment({**_LIGHT, "RAY_AUTH_TOKEN_PATH": str(token)})
        AuthenticationTokenLoader.instance().reset_cache()  # of an earlier session of this process
        # Ray would replace 127.0.0.1 by an address that other machines can reach, and listen on all.
        ray_constants.ENABLE_RAY_CLUSTER = False
        ray.init(
            address="local",
            num_cpus=num_devices,  # nothing counts on it but how many workers may start at a time
            num_gpus=num_devices,  # devices of any kind: workers count on nothing else
            object_store_memory=None if object_store_gb is None else int(object_store_gb * 1e9),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(self._folder / "ray"),
            _node_ip_address="127.0.0.1",
        )

    def _join(self, address: str) -> None:
        self._set_environment({"RAY_gcs_rpc_server_reconnect_timeout_s": str(_RECONNECT_S)})
        AuthenticationTokenLoader.instance().reset_cache()
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise UserError(f"cluster.address={address}: no Ray cluster can be joined there: {error}") from error

    def _set_environment(self, values: dict[str, str]) -> None:
        self._environment = {name: os.environ.get(name) for name in values}
        os.environ.update(values)

    def check_node(self) -> None:
        """Raises UserError where the Ray of this node is gone: at the next use of the object store, Ray would end this
        process without a word.
        """
        if not self._raylet.is_running() or self._raylet.status() == psutil.STATUS_ZOMBIE:
            raise UserError(f"the Ray of this node has ended; {_GO_ON}")

    def check(self, timeout_s: float) -> None:
        """Raises UserError also where Ray's head does not answer by then, or no longer knows this node."""
        self.check_node()
        here = ray.NodeID.from_hex(ray.get_runtime_context().get_node_id())
        try:
            known = ray._private.worker.global_worker.gcs_client.check_alive([here], timeout_s)
        except ray.exceptions.RpcError as error:
            raise UserError(f"{self._head} has not answered for {timeout_s:g} s; {_GO_ON}") from error
        if not all(known):
            raise UserError(f"{self._head} was restarted and knows nothing of this run; {_GO_ON}")


def _raylet() -> psutil.Process:
    """The process of Ray on this node."""
    socket = ray._private.worker.global_worker.node.raylet_socket_name
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and any(socket in argument for argument in process.info["cmdline"] or ()):
            return process
    raise UserError(f"the Ray of this node has ended; {_GO_ON}")


def _end_those_of(folder: Path) -> None:
    """Kill the children of this process that work in the folder, and theirs."""
    ended = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if any(str(folder) in argument for argument in child.cmdline()):
                ended += [*child.children(recursive=True), child]
    for process in ended:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ended, timeout=10)


def _remove_stale_folders() -> None:
    """Those of this user's runs that were killed before they could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _sigterm_as_it_is() -> Iterator[None]:
    """While entered, Ray does not take SIGTERM for itself to exit; what its native part has taken is given back."""
    taken = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = taken
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
