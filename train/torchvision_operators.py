"""Import this before a torchvision that was built for another torch, such as a CUDA build with a CPU torch.

Otherwise torchvision's import fails with "operator torchvision::nms does not exist": the compiled half cannot
be loaded, but the Python half registers functions for its operators. With these operators declared, models,
transforms and datasets work. The operators themselves (torchvision.ops) need a build that fits this torch.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")  # the declarations last as long as this object
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
