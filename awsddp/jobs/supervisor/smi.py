"""What nvidia-smi says of the GPUs of this node."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

# What makes a GPU unfit: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_BAD = {
    "remapped_row_failure": ("Yes", "row remapping failed"),
    "remapped_row_pending": ("Yes", "row remapping is pending: reboot"),
    "pending_retirement": ("Yes", "page retirement is pending: reboot"),
    "reset_required": ("Yes", "needs a reset"),
    "hw_slowdown": ("Active", "its clocks are held down (hw_slowdown)"),
    "hw_thermal_slowdown": ("Active", "its clocks are held down (hw_thermal_slowdown)"),
    "hw_power_brake_slowdown": ("Active", "its clocks are held down (hw_power_brake_slowdown)"),
    "sw_thermal_slowdown": ("Active", "its clocks are held down (sw_thermal_slowdown)"),
}
_REASON = re.compile("clocks_(event|throttle)_reason_")  # older drivers say throttle


def gpus(said: str) -> list[dict[str, Any]]:
    """Return the GPUs in what `nvidia-smi -q -x` printed, [] where it cannot be read.

    Each has `name`, `memory_mib`, `errors` (uncorrectable ECC errors since the driver was loaded),
    and `faults`, in words.
    """
    try:
        log = ET.fromstring(said)
    except ET.ParseError:
        return []
    return [_gpu(one) for one in log.findall("gpu")]


def _gpu(one: ET.Element) -> dict[str, Any]:
    texts = {_REASON.sub("", part.tag): (part.text or "").strip() for part in one.iter()}
    counts = [part for part in one.iterfind("ecc_errors/volatile//*") if "uncorrectable" in part.tag]
    return {
        "name": one.findtext("product_name", ""),
        "memory_mib": _first(one.findtext("fb_memory_usage/total", "")),
        "errors": sum(_first(part.text or "") for part in counts),
        "faults": [words for tag, (bad, words) in _BAD.items() if texts.get(tag) == bad],
    }


def _first(text: str) -> int:
    word = (text.split() or [""])[0]
    return int(word) if word.isdigit() else 0
