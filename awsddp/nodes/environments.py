"""Create the ranks' environment on all nodes at once if it does not exist, and keep the nodes identical."""

import contextlib
import functools
import getpass
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import msgspec

from awsddp.errors import NodeError
from awsddp.model.events import Event
from awsddp.model.node_answers import Answer, Environment, Platform, append_output, read_answer
from awsddp.model.records import Count
from awsddp.nodes.catalog import Catalog, find_urls, signing_key
from awsddp.nodes.fleet import Fleet, Request, Result
from awsddp.nodes.node_failures import NodeFailure, tail
from awsddp.nodes.package_mirror import Mirror
from awsddp.plan.environment import (
    EnvironmentPlan,
    check_identical_nodes,
    explain_failure,
    pin_image_packages,
)
from awsddp.plan.indexes import Indexes, is_local_folder, read_pip_indexes
from awsddp.plan.project import SCM_VERSION, UNKNOWN_VERSION, Project
from awsddp.util.formatting import node_name
from awsddp.util.parallel import results_or_raise
from awsddp.util.shipped_files import template

_PYPI = "https://pypi.org/simple"
_MINIFORGE = "https://github.com/conda-forge/miniforge/releases/latest/download/"
_INSTALLER = "Miniforge3-Linux-{}.sh"
_UV_PYTHONS = "https://github.com/astral-sh/python-build-standalone/releases/download"
"""The default for UV_PYTHON_INSTALL_MIRROR, the URL from which uv downloads Python
(https://docs.astral.sh/uv/reference/environment/#uv_python_install_mirror)."""
_LOOK_S = 60.0
_SILENT_S = 2400.0
"""How long a build may run without output, for example while a large package is downloaded."""

_WAITING_FOR_BUILD = re.compile(r"waiting for a build of .*?, process (\d+): .*", re.DOTALL)


def ensure_environments(
    fleet: Fleet,
    plan: EnvironmentPlan,
    *,
    pythons: Mapping[int, str],
    cache: Path,
    send_files: Callable[[], object] = lambda: None,
) -> dict[int, Environment]:
    """Return each node's environment, and create the environments that do not exist.

    If all environments exist, one round trip is enough.

    `pythons`: {node: the image's Python}. `cache`: the folder for resolved versions. `send_files` syncs the
    project folder, in which the `env.setup` commands run. Raises ConfigError. Raises NodeError if nodes
    differ, or if nodes fail; the error then has each failed node's last lines of output. Events are reported
    by the fleet's `on_event`.
    """
    looks = {node: _request(plan, "look", pythons[node]) for node in fleet.nodes}
    environments = _run(fleet, plan, looks, _LOOK_S)
    missing = [node for node, environment in environments.items() if not environment.ready]
    if missing:
        _report_unknown_versions(fleet, plan.projects)
        if plan.setup:
            send_files()
        local_indexes = functools.cache(read_pip_indexes)
        resolved = _resolve_versions(fleet, plan, environments[missing[0]].platform, cache, local_indexes)
        source = _package_source(fleet, resolved, missing, local_indexes, signing_key(cache))
        with source as (node_plan, variables, mirror):
            is_conda = plan.kind == "conda"
            miniforge = mirror.catalog.rewrite_location(_MINIFORGE, "tree") if is_conda else _MINIFORGE
            builds = {
                node: _request(
                    node_plan,
                    "build",
                    pythons[node],
                    install={**node_plan.indexes.environ, **variables.get(node, {})},
                    stamp=plan.stamp,
                    constraints=[*node_plan.constraints, *_image_pins(plan, environments[node])],
                    miniforge=miniforge + _INSTALLER,
                )
                for node in missing
            }
            environments |= _run(fleet, plan, builds, _SILENT_S, mirror.explain_output)
        for node in missing:
            torch = environments[node].facts.get("torch")
            fleet.on_event(
                Event(f"environment: {plan.name}, torch {torch}", who=node_name(node), fraction=1.0)
            )
    check_identical_nodes({node: environment.facts for node, environment in environments.items()})
    return environments


def _report_unknown_versions(fleet: Fleet, projects: Sequence[Project]) -> None:
    for project in projects:
        if project.has_version:
            continue
        name = project.info.partition("-")[0]
        why = f"{name} has version {UNKNOWN_VERSION} on the nodes: only its build sets it, and none runs"
        fleet.on_event(Event(f"{why}; to set the version: export {SCM_VERSION}_FOR_{name.upper()}=1.0"))


def _resolve_versions(
    fleet: Fleet,
    plan: EnvironmentPlan,
    platform: Platform | None,
    cache: Path,
    local_indexes: Callable[[], Indexes],
) -> EnvironmentPlan:
    """Return the plan with versions pinned for all nodes, or the same plan if the nodes resolve versions.

    Raises ConfigError if requirements cannot be met.
    """
    if not plan.lines or platform is None:
        return plan
    from awsddp.plan.resolve import choose_packages, make_target

    fleet.on_event(Event(f"choosing packages for {plan.name}", ""))
    pins, why = choose_packages(plan, make_target(plan, platform), cache=cache, read_indexes=local_indexes)
    if why:
        fleet.on_event(Event(f"{plan.name}: {why}; the nodes choose the packages", ""))
    return plan if pins is None or plan.kind == "conda" else replace(plan, lines=pins)


def _image_pins(plan: EnvironmentPlan, environment: Environment) -> tuple[str, ...]:
    platform = environment.platform
    return pin_image_packages(platform.packages) if platform and plan.kind == "image" else ()


@contextlib.contextmanager
def _package_source(
    fleet: Fleet,
    plan: EnvironmentPlan,
    nodes: Sequence[int],
    local_indexes: Callable[[], Indexes],
    key: bytes,
) -> Iterator[tuple[EnvironmentPlan, Mapping[int, Mapping[str, str]], Mirror]]:
    """Yield the plan for the nodes, the environment variables with the mirror's address, and the mirror.

    The mirror serves all packages, or only packages in local folders and in indexes with a password.
    Raises NodesFailed.
    """
    everything, indexes = plan.packages_from == "client", plan.indexes.with_defaults(local_indexes())
    proxy = plan.environ.get("https_proxy", "")
    catalog = Catalog(everything=everything, key=key)
    with Mirror(catalog, ca=indexes.ca, proxy=proxy) as mirror:
        if plan.packages_from == "node" or not plan.has_packages:
            remote_links = tuple(link for link in indexes.find_links if not is_local_folder(link))
            yield replace(plan, indexes=replace(indexes, find_links=remote_links)), {}, mirror
            return
        node_plan = _rewrite_plan(replace(plan, indexes=indexes), catalog)
        if not everything and not catalog.host_names:
            yield node_plan, {}, mirror
            return
        trusted = (*indexes.trusted_hosts, *catalog.host_names)
        node_plan = replace(node_plan, indexes=replace(node_plan.indexes, trusted_hosts=trusted))
        if everything:
            fleet.on_event(Event("packages come through this machine", ""))
        tool_variables = _tool_variables(plan, catalog) if everything else {}
        urls = find_urls(json.dumps(asdict(node_plan)))
        with fleet.forward_ports(nodes, mirror.serve) as ports:
            yield (
                node_plan,
                {node: mirror.environ(port, urls) | tool_variables for node, port in ports.items()},
                mirror,
            )


def _rewrite_plan(plan: EnvironmentPlan, catalog: Catalog) -> EnvironmentPlan:
    """Return a plan with its URLs (for indexes, repositories, files and channels) rewritten for nodes."""
    indexes = plan.indexes
    if catalog.everything and not indexes.no_index:
        indexes = replace(indexes, index_url=indexes.index_url or _PYPI)
    torch = plan.torch[: 2 if indexes.no_index else None]
    return replace(
        plan,
        indexes=replace(
            indexes,
            index_url=catalog.rewrite_index(indexes.index_url),
            extra_index_urls=tuple(map(catalog.rewrite_index, indexes.extra_index_urls)),
            find_links=tuple(map(catalog.rewrite_links_page, indexes.find_links)),
        ),
        torch=tuple(catalog.rewrite_index(word.replace("--index", "--extra-index")) for word in torch)
        if catalog.everything
        else plan.torch,
        lines=tuple(map(catalog.rewrite_requirement, plan.lines)),
        constraints=tuple(map(catalog.rewrite_requirement, plan.constraints)),
        conda=catalog.rewrite_conda_file(plan.conda) if plan.conda else "",
    )


def _tool_variables(plan: EnvironmentPlan, catalog: Catalog) -> dict[str, str]:
    """Return the variables with the URLs from which uv downloads Python, or conda downloads packages."""
    if plan.kind == "conda":
        return catalog.conda_environ()
    return (
        {"UV_PYTHON_INSTALL_MIRROR": catalog.rewrite_location(_UV_PYTHONS, "tree")}
        if plan.kind == "venv"
        else {}
    )


def _request(plan: EnvironmentPlan, do: str, image: str, **fields: object) -> Request:
    """Return the request that checks for the environment (`do` is "look") or creates it ("build")."""
    document = {
        **asdict(plan),
        "ca": plan.indexes.ca,
        "stamp": plan.stamp,
        "setup_stamp": plan.setup_stamp,
        "do": do,
        "client": _client(),
        "image": image,
        **fields,
    }
    # The request is sent on stdin, not on the command line. An index URL may contain a password, and all
    # users on a node can read command lines.
    return ["python3", "-I", "-S", "-c", template("environment.py")], json.dumps(document).encode()


def _client() -> str:
    """Return this client's name. Other clients see the name while they wait for this client's build."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class _Step(msgspec.Struct, frozen=True):
    """A line about a program's progress: the step `at`, and the `fraction` of `size` bytes that is done.

    The program's result is parsed as a step whose `at` is None.
    """

    at: str | None = None
    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    size: Count | None = None


def run_programs(
    fleet: Fleet,
    requests: Mapping[int, Request],
    kind: type[Answer],
    *,
    failure_message: str,
    silent_s: float,
    translate: Callable[[str], str] = str,
) -> dict[int, Answer | NodeError]:
    """Run programs that print lines of JSON, and return each program's last line, which is the result.

    Other lines are reported as events. `failure_message` is the error for a node without a result. Output of
    a node never raises an exception.
    """
    received = {node: bytearray() for node in requests}
    results: dict[int, bytes] = {}

    def on_data(node: int, data: bytes) -> None:
        append_output(received[node], data, node=node)
        *lines, received[node] = received[node].split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # a login shell's startup files may print text
                step = msgspec.json.decode(line, type=_Step)
                if step.at is None:
                    results[node] = bytes(line)
                else:
                    text = translate(step.at).partition("\n")[0][:200]
                    fleet.on_event(Event(text, who=node_name(node), fraction=step.fraction, size=step.size))

    def outcome(node: int, end: Result | NodeError) -> Answer | NodeError:
        if isinstance(end, NodeError):
            return end
        if node not in results:
            return NodeFailure(node, "command", failure_message, end.tail())
        try:
            return read_answer(results[node], kind, node=node)
        except NodeError as error:
            return error

    ends = fleet.stream(requests, on_data, silent_after_s=silent_s)
    return {node: outcome(node, end) for node, end in ends.items()}


def _run(
    fleet: Fleet,
    plan: EnvironmentPlan,
    requests: Mapping[int, Request],
    silent_s: float,
    translate: Callable[[str], str] = str,
) -> dict[int, Environment]:
    failed = "its environment could not be created"
    outcomes = run_programs(
        fleet, requests, Environment, failure_message=failed, silent_s=silent_s, translate=translate
    )
    return results_or_raise(
        {node: _outcome(plan, node, outcome, translate) for node, outcome in outcomes.items()}
    )


def _outcome(
    plan: EnvironmentPlan, node: int, result: Environment | NodeError, translate: Callable[[str], str]
) -> Environment | NodeError:
    """Return the environment that a node reported, or the error for a step that failed."""
    if isinstance(result, NodeError) or not result.failed:
        return result
    if result.failed in plan.setup:
        return NodeFailure(
            node, "command", f"env.setup: {result.failed!r} failed", tail(result.said), "correct the command"
        )
    if build := _WAITING_FOR_BUILD.fullmatch(result.failed):
        advice = f"awsddp exec --node {node} -- kill {build[1]}   # ends that build; then repeat the command"
        return NodeFailure(node, "command", result.failed, result.said, advice)
    name = "[env]" if plan.name == plan.kind else plan.name
    output = translate(result.said)
    refusal = explain_failure(output, name=name, internet=plan.internet, packages_from=plan.packages_from)
    return NodeFailure(node, "command", f"{result.failed}: {refusal.message}", refusal.why, refusal.next)
