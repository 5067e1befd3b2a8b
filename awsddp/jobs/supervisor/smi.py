"""What nvidia-smi says of the GPUs of this node."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

# What makes a GPU unfit: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
_BAD = (
    ("remapped_rows/remapped_row_failure", "row remapping failed"),
    ("remapped_rows/remapped_row_pending", "row remapping is pending: reboot"),
    ("retired_pages/pending_retirement", "page retirement is pending: reboot"),
    ("gpu_reset_status/reset_required", "needs a reset"),
)
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_SLOW = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


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
    faults = [words for path, words in _BAD if one.findtext(path, "").strip() == "Yes"]
    for path in (
        "clocks_event_reasons/clocks_event_reason",
        "clocks_throttle_reasons/clocks_throttle_reason",
    ):
        slow = [name for name in _SLOW if one.findtext(f"{path}_{name}", "").strip() == "Active"]
        faults += [f"its clocks are held down ({name})" for name in slow]
    volatile = one.find("ecc_errors/volatile")
    counts = [] if volatile is None else [part for part in volatile.iter() if "uncorrectable" in part.tag]
    return {
        "name": one.findtext("product_name", ""),
        "memory_mib": _first(one.findtext("fb_memory_usage/total", "")),
        "errors": sum(_first(part.text or "") for part in counts),
        "faults": faults,
    }


def _first(text: str) -> int:
    word = (text.split() or [""])[0]
    return int(word) if word.isdigit() else 0
