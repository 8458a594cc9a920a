"""The worker of a rank as a Ray actor."""

import os
from collections.abc import Mapping

from unirl.cluster.codec import send_tensors_as_numpy
from unirl.cluster.numa import stay_near_device
from unirl.cluster.seat import Seated
from unirl.cluster.worker import MakeModels, Worker


class RayWorker(Seated, Worker):
    """Hosts the models of one rank in a process of its own."""

    def __init__(self, bundle: int, make_models: MakeModels, directory: str, environment: Mapping[str, str]):
        """directory, environment: those of the driver, so that relative paths and settings mean the same here."""
        os.chdir(directory)
        os.environ.update(environment)
        send_tensors_as_numpy()
        Seated.__init__(self, bundle)
        self._processors = stay_near_device()
        Worker.__init__(self, make_models)
