"""Python runs this at the start of every process of a CPU server: it declares two operators of torchvision.

The torchvision wheel on the package index is built for CUDA. Its binary does not load beside a CPU build of torch, so
`torchvision::nms` does not exist, and `import torchvision` fails where it describes that operator's shapes. Declaring
the operators first is enough: a text model never calls them.
"""

import importlib.abc
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; the first search for torchvision is the moment to declare its operators."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.__class__.library = torch.library.Library("torchvision", "FRAGMENT")  # lives as long as it is held
            for operator in OPERATORS:
                self.library.define(operator)


sys.meta_path.insert(0, _BeforeTorchvision())
