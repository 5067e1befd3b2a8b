"""The keywords of the Python API: the keys of awsddp.toml, with their types.

Generated from settings/spec.py by `python -m tests.api.test_keywords`.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict


class _Shared(TypedDict, total=False):
    region: str | None
    profile: str | None
    nodes: int
    instance_type: str | None
    gpus: str | None
    image: str | None
    disk_gb: int | None
    spot: bool | Literal["first"]
    max_price_usd: float | None
    budget_usd: float | None
    idle: str
    expires: str
    replace: Sequence[str]
    subnet: str | None
    security_group: str | None
    ssh_cidr: Sequence[str]
    address: Literal["public", "private"]
    jump: str | None
    user: str | None
    key_file: str | None
    instance_profile: str | None
    kms_key: str | None
    zones: Sequence[str]
    regions: Sequence[str]
    reservation: str | None
    efa: bool
    placement_group: bool
    retry_until_up: bool
    experimental: bool
    local_gpus: Literal["on", "off"]
    kind: Literal["image", "venv", "conda"] | None
    file: str | None
    python: str | None
    setup: Sequence[str]
    packages_from: Literal["node", "client"] | None
    index_url: str | None
    ca_bundle: str | None
    proxy: str | None
    variables: dict[str, str]
    secrets: Sequence[str]
    workdir: str
    ignore: Sequence[str]
    data: Sequence[str]
    requester_pays: bool
    world_size: int | None
    nproc_per_node: int | None
    launcher: str
    nnodes: str | None
    resume: str | None
    after: str | None
    on: str | None
    max_restarts: int | None
    recover: int | None
    recover_on: Sequence[str]
    module: bool
    prefix: Sequence[str]
    outputs: Sequence[str]
    results: str
    save_to: str | None
    exclude: Sequence[str]
    results_limit: str
    timeout: str | None
    hang_after: str | None
    grace: str
    heartbeat_timeout: str
    notify_url: str | None
    notify_format: Literal["text", "json"]


class Keys(_Shared, total=False):
    """The keywords of a cluster and of its jobs."""

    script: str | None
    args: Sequence[object]


class JobKeys(_Shared, total=False):
    """The keywords of a job, in addition to its script and arguments."""

    name: str | None
