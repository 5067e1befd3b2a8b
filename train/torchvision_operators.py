"""Import this before a torchvision that was built for another torch, as a CUDA build with a CPU torch.

Its import fails with "operator torchvision::nms does not exist": the compiled half cannot be loaded, and the
Python half registers functions for its operators. Declared here, they let models, transforms and datasets
work. The operators themselves (torchvision.ops) need a build that fits.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")  # its declarations last as long as this object
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
