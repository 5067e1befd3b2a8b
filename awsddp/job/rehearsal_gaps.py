"""Recognize job failures that are caused by a limit of the rehearsal, which a node on AWS would not have."""

import re

from awsddp.model.records import Cause, Target

_OPERATORS = re.compile(r"custom C\+\+ ops|torchvision::nms")
_LEAVE_OUT = "do not use it in a rehearsal, where torch.cuda.get_device_name() ends with (rehearsed)"


def find_rehearsal_gap(target: Target, cause: Cause) -> tuple[str, str] | None:
    """Return the rehearsal limit that caused the failure, and the next step, or None for other causes."""
    if target.name != "local":
        return None
    if cause.kind == "no_internet" and target.node_s3 != target.endpoint:  # loopback: this machine's network
        why = "The nodes of a rehearsal reach only this machine, but nodes on AWS reach the internet"
        return why, "awsddp train --data FOLDER   # a local folder; on AWS the job can download the data"
    if cause.kind == "packages_mismatch" and _OPERATORS.search(cause.explanation):
        why = "A rehearsal has torch for the CPU, for which its torchvision has no operators"
        return f"{why}; the image of a GPU node has torch for CUDA and the operators", _LEAVE_OUT
    if cause.kind == "import_error" and cause.values.get("module") == "triton":
        why = "The package comes with torch for CUDA, but a rehearsal has torch for the CPU"
        return f"{why}; the image of a GPU node has it", _LEAVE_OUT
    return None
