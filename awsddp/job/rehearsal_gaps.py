"""Recognize job failures that are caused by a limit of the rehearsal, which a node on AWS would not have."""

import re

from awsddp.model.records import Cause, Target

_OPERATORS = re.compile(r"custom C\+\+ ops|torchvision::nms")
_LEAVE_OUT = "leave it out of the rehearsal: there torch.cuda.get_device_name() ends with (rehearsed)"


def find_rehearsal_gap(target: Target, cause: Cause) -> tuple[str, str] | None:
    """Return the rehearsal limit that caused the failure, and the next step, or None for other causes."""
    if target.name != "local":
        return None
    if cause.kind == "no_internet" and target.node_s3 != target.endpoint:  # loopback: this machine's network
        why = "Nodes of a rehearsal reach this machine alone; a node on AWS reaches the internet"
        return why, "awsddp train --data FOLDER   # what this machine has of it; on AWS it may be downloaded"
    if cause.kind == "packages_mismatch" and _OPERATORS.search(cause.explanation):
        why = "A rehearsal has torch for the CPU, and its torchvision has no operators for it"
        return f"{why}; the image of a GPU node has both", _LEAVE_OUT
    if cause.kind == "import_error" and cause.values.get("module") == "triton":
        why = "It comes with torch for CUDA, and a rehearsal has torch for the CPU"
        return f"{why}; the image of a GPU node has it", _LEAVE_OUT
    return None
