"""What nvidia-smi prints, in its own format; elements that are not read are left out."""

from typing import Any

import pytest

from awsddp.agent import probe
from awsddp.agent.messages import Response
from awsddp.agent.probe import parse_gpus

# A DTD of version 12, as driver 535 writes it; of version 11 before.
LOG = """\
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <timestamp>Fri Aug  4 11:44:30 2023</timestamp>
    <driver_version>535.54.03</driver_version>
    <cuda_version>12.2</cuda_version>
    <attached_gpus>1</attached_gpus>
    <gpu id="00000000:01:00.0">
        <product_name>NVIDIA A100-SXM4-80GB</product_name>
        <gpu_reset_status>
            <reset_required>No</reset_required>
            <drain_and_reset_recommended>No</drain_and_reset_recommended>
        </gpu_reset_status>
        <clocks_event_reasons>
            <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
            <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
            <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
        </clocks_event_reasons>
        <fb_memory_usage>
            <total>81920 MiB</total>
        </fb_memory_usage>
        <ecc_errors>
            <volatile>
                <sram_correctable>7</sram_correctable>
                <sram_uncorrectable>0</sram_uncorrectable>
                <dram_correctable>0</dram_correctable>
                <dram_uncorrectable>0</dram_uncorrectable>
            </volatile>
            <aggregate>
                <dram_uncorrectable>3</dram_uncorrectable>
            </aggregate>
        </ecc_errors>
        <retired_pages>
            <pending_retirement>N/A</pending_retirement>
        </retired_pages>
        <remapped_rows>
            <remapped_row_corr>0</remapped_row_corr>
            <remapped_row_unc>0</remapped_row_unc>
            <remapped_row_pending>No</remapped_row_pending>
            <remapped_row_failure>No</remapped_row_failure>
        </remapped_rows>
    </gpu>
</nvidia_smi_log>
"""
HEALTHY: dict[str, Any] = {
    "name": "NVIDIA A100-SXM4-80GB",
    "memory_mib": 81920,
    "errors": 0,
    "faults": [],
}


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("", "", {}),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>2", {"errors": 2}),
        ("<sram_uncorrectable>0", "<sram_uncorrectable>N/A", {}),
        ("pending>No", "pending>Yes", {"faults": ["row remapping is pending: reboot"]}),
        ("failure>No", "failure>Yes", {"faults": ["row remapping failed"]}),
        ("reset_required>No", "reset_required>Yes", {"faults": ["needs a reset"]}),
        (
            "thermal_slowdown>Not Active",
            "thermal_slowdown>Active",
            {"faults": ["its clocks are throttled (hw_thermal_slowdown)"]},
        ),
        ("clocks_event_reason", "clocks_throttle_reason", {}),
    ],
)
def test_gpu_is_parsed_with_its_faults(old: str, new: str, changes: dict[str, Any]) -> None:
    assert parse_gpus(LOG.replace(old, new) if old else LOG) == [Response(**{**HEALTHY, **changes})]


def test_truncated_output_has_no_gpus() -> None:
    assert parse_gpus(LOG[:900]) == []
    assert parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == []


def test_inactive_links_and_xids_are_counted() -> None:
    links = "GPU 3: Tesla V100-SXM2-32GB (UUID: GPU-1)\n\t Link 0: 25.781 GB/s\n\t Link 1: <inactive>\n"
    assert len(probe._LINK.findall(links)) == 1
    log = (
        "[ 1843.3] NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, "
        "GPU has fallen off the bus.\n"
    )
    assert probe._XID.findall(log) == ["79"]
