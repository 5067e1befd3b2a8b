"""Which GPU, driver, CUDA, torch and image fit each other: the tables, and what is read from them."""

import pytest

from awsddp.compat.releases import (
    ARCHITECTURES,
    RELEASES,
    Architecture,
    KernelModule,
    Release,
    explain_missing_image,
    find_driver_problem,
    find_image_problem,
    find_release,
    find_unknown_torch,
    find_wheel_problem,
    in_table,
    is_family_unlisted,
    least_driver,
    ssh_user,
)
from awsddp.compat.types import GPU_TYPES
from tests.support.gpus import gpu

DLAMI = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch {} (Ubuntu {}) 20260822"
AMAZON_LINUX = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Amazon Linux 2023) {}"
K80_IMAGE = "Deep Learning AMI GPU PyTorch 1.10.0 (Ubuntu 18.04) 20211208"
PROPRIETARY = "Deep Learning Base Proprietary Nvidia Driver GPU AMI (Amazon Linux 2) Version 71.6"


def list_fitting(gpu: Architecture, driver: int | None) -> list[tuple[str, str]]:
    return [
        (row.torch, cuda)
        for row in RELEASES
        for cuda in reversed(row.wheels)
        if not find_wheel_problem(row, cuda, gpu, driver=driver)
    ]


def row(torch: str) -> Release:
    release = find_release(torch)
    assert release is not None
    return release


@pytest.mark.parametrize(
    ("name", "driver", "newest"),
    [
        ("K80", 470, ("2.0", "11.8")),
        ("M60", 580, ("2.14", "12.6")),
        ("V100", 580, ("2.14", "12.6")),
        ("V100", 470, ("2.7", "11.8")),
        ("T4", None, ("2.14", "13.2")),
        ("T4", 535, ("2.14", "12.6")),
        ("A100", 450, ("2.7", "11.8")),
        ("H100", 580, ("2.14", "13.2")),
        ("B200", 570, ("2.11", "12.8")),
        ("B300", 580, ("2.14", "13.2")),
        ("RTX PRO 6000", 595, ("2.14", "13.2")),
    ],
)
def test_the_newest_torch_of_each_gpu_with_a_driver(
    name: str, driver: int | None, newest: tuple[str, str]
) -> None:
    assert list_fitting(gpu(name), driver)[0] == newest


@pytest.mark.parametrize(
    ("torch", "cuda", "name", "expected"),
    [
        ("2.12", "12.8", "T4", "no wheel for CUDA 12.8"),
        ("2.12", "13.0", "V100", "no code for the V100"),
        ("2.5", "12.4", "B200", "no code for the B200"),
        ("1.13", "11.7", "H100", "no code for the H100"),
        ("2.1", "11.8", "K80", "torch 2.0 is the last"),
        ("2.1", "12.1", "K80", "no code for the K80"),
        ("2.12", "13.0", "L4", ""),
        ("2.6", "12.4", "L40S", ""),
        ("2.7", "12.8", "B300", ""),
        ("1.10", "11.3", "K80", ""),
    ],
)
def test_a_wheel_fits_a_gpu_or_has_a_reason_why_not(torch: str, cuda: str, name: str, expected: str) -> None:
    reason = find_wheel_problem(row(torch), cuda, gpu(name))
    assert (expected in reason) if expected else reason == ""


def test_a_wheel_needs_a_driver_that_runs_its_cuda() -> None:
    assert "needs driver 580 or newer, but only driver 570 is available" in find_wheel_problem(
        row("2.13"), "13.0", gpu("A100"), driver=570
    )
    assert [least_driver(cuda) for cuda in ("13.2", "12.6", "11.8", "10.2")] == [580, 525, 450, 440]


@pytest.mark.parametrize(
    ("name", "driver", "module", "expected"),
    [
        ("K80", 580, "proprietary", "driver 580 is too new for the K80"),
        ("K80", 470, "open", "open-source driver does not support the K80"),
        ("V100", 595, "proprietary", "last branch is 580"),
        ("B200", 580, "proprietary", "needs the open driver"),
        ("B200", 550, "open", "too old"),
        ("H100", 580, "open", ""),
        ("T4", None, None, ""),
    ],
)
def test_a_driver_supports_a_gpu_or_has_a_reason_why_not(
    name: str, driver: int | None, module: KernelModule | None, expected: str
) -> None:
    reason = find_driver_problem(gpu(name), driver=driver, module=module)
    assert (expected in reason) if expected else reason == ""


@pytest.mark.parametrize(
    ("type_", "image", "expected"),
    [
        ("p3dn.24xlarge", DLAMI.format("2.12", "24.04"), "open-source driver"),
        ("p3dn.24xlarge", PROPRIETARY, ""),
        ("p3dn.24xlarge", K80_IMAGE, ""),
        ("g6.48xlarge", K80_IMAGE, "driver 470 is too old"),
        ("p6-b200.48xlarge", PROPRIETARY, "needs the open driver"),
        ("p6-b200.48xlarge", DLAMI.format("2.6", "22.04"), "no code for the B200"),
        ("p6-b300.48xlarge", DLAMI.format("2.8", "24.04"), "too old for the B300"),
        ("p3dn.24xlarge", DLAMI.format("2.13", "26.04"), "open-source driver"),
        ("g6.48xlarge", DLAMI.format("2.13", "26.04"), ""),
        ("g6f.xlarge", DLAMI.format("2.12", "24.04"), "do not list g6f"),
        ("g6f.xlarge", DLAMI.format("2.13", "26.04"), "do not list g6f"),
        ("gr6f.4xlarge", AMAZON_LINUX.format("20260418"), "do not list gr6f"),
        ("gr6f.4xlarge", AMAZON_LINUX.format("20260808"), ""),
        ("g6f.xlarge", "an image of one's own", ""),
        ("g6.48xlarge", DLAMI.format("2.12", "24.04"), ""),
        ("g6.48xlarge", "an image of one's own", ""),
    ],
)
def test_an_image_fits_a_type_or_has_a_reason_why_not(type_: str, image: str, expected: str) -> None:
    why = find_image_problem(GPU_TYPES[type_], image)
    assert (expected in why) if expected else why == ""


@pytest.mark.parametrize("type_", ["g5g.xlarge", "p5.48xlarge"])
def test_the_notes_of_the_images_for_arm64_list_other_families(type_: str) -> None:
    image = "Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch 2.12 (Ubuntu 24.04) 20260822"
    assert is_family_unlisted(GPU_TYPES[type_], image) == (type_ == "p5.48xlarge")


@pytest.mark.parametrize(
    ("name", "is_known", "unknown"),
    [
        (DLAMI.format("2.13", "26.04"), True, ""),
        (DLAMI.format("2.12", "24.04"), True, ""),
        (DLAMI.format("2.6.0", "22.04"), True, ""),
        (DLAMI.format("2.12", "26.04"), False, ""),
        (DLAMI.format("2.99", "28.04"), False, "2.99"),
        (AMAZON_LINUX.format("20260808"), False, ""),
        ("ours, PyTorch 2.99", False, ""),
    ],
)
def test_an_image_is_looked_up_in_the_table_by_its_name(name: str, is_known: bool, unknown: str) -> None:
    assert (in_table(name), find_unknown_torch(name)) == (is_known, unknown)


@pytest.mark.parametrize(
    ("name", "user"),
    [
        (DLAMI.format("2.13", "26.04"), "ubuntu"),
        (AMAZON_LINUX.format("20260808"), "ec2-user"),
        ("ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20260801", "ubuntu"),
        ("amzn2-ami-hvm-2.0.20260801.0-x86_64-gp2", "ec2-user"),
        ("al2023-ami-2023.12.20260803.0-kernel-6.12-x86_64", "ec2-user"),
        ("RHEL-9.6.0_HVM-20260801-x86_64-0-Hourly2-GP3", "ec2-user"),
        ("suse-sles-15-sp7-v20260801-hvm-ssd-x86_64", "ec2-user"),
        ("Rocky-9-EC2-Base-9.6-20260801.0.x86_64", "rocky"),
        ("AlmaLinux OS 9.6.20260801 x86_64", "ec2-user"),
        ("Fedora-Cloud-Base-AmazonEC2.x86_64-44-20260801.0", "fedora"),
        ("CentOS Stream 9 x86_64 20260801", "ec2-user"),
        ("CentOS Linux 7 x86_64 HVM EBS ENA 2002_01", "centos"),
        ("debian-13-amd64-20260801-2000", "admin"),
        ("acme-training-2026-10", ""),
    ],
)
def test_the_login_user_is_read_from_the_name_or_not_guessed(name: str, user: str) -> None:
    assert ssh_user(name) == user


def test_every_gpu_has_some_torch_that_runs_on_it() -> None:
    for architecture in ARCHITECTURES:
        assert list_fitting(architecture, None), architecture


def test_a_torch_version_finds_its_row() -> None:
    assert row("2.13.0+cpu").torchvision == "0.28"
    assert row("2.1").torch == "2.1"
    assert row("2.12").torch == "2.12"
    assert "3.14" in row("2.12").pythons
    assert find_release("9.9") is None
    assert find_release("nightly") is None


def test_deregistered_images_are_explained() -> None:
    assert "deregistered" in explain_missing_image("Deep Learning AMI (Ubuntu) Version 14.0")
    assert "deregistered" in explain_missing_image(K80_IMAGE)
    assert explain_missing_image(DLAMI.format("2.12", "24.04")) == ""
