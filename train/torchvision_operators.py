"""Import this before torchvision where its build does not fit torch's, as a CUDA build beside a CPU torch.

`import torchvision` ends there with "operator torchvision::nms does not exist", because its compiled half
cannot be loaded, and its Python half registers parts for the operators of that half. Declared here, they let
models, transforms and datasets work; only the operators themselves (torchvision.ops) need a build that fits.
"""

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")  # what it declares lasts as long as the object
for _name in ("nms", "qnms"):
    LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
