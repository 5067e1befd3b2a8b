"""Makes the ranks' environment on all nodes at once, where it is not there already, and holds them alike."""

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
from awsddp.model.node_answers import Answer, Environment, Platform, read_answer, take
from awsddp.model.records import Count
from awsddp.nodes.catalog import Catalog, signing_key, urls_in
from awsddp.nodes.fleet import Fleet, Request, Result
from awsddp.nodes.node_failures import NodeFailure, tail
from awsddp.nodes.package_mirror import Mirror
from awsddp.plan.environment import EnvironmentPlan, explain, image_constraints, refuse_unlike
from awsddp.plan.indexes import Indexes, indexes_here, is_folder_here
from awsddp.plan.project import SCM_VERSION, UNKNOWN_VERSION, Project
from awsddp.util.format import node_name
from awsddp.util.parallel import split
from awsddp.util.shipped_files import template

_PYPI = "https://pypi.org/simple"
_MINIFORGE = "https://github.com/conda-forge/miniforge/releases/latest/download/"
_INSTALLER = "Miniforge3-Linux-{}.sh"
_UV_PYTHONS = "https://github.com/astral-sh/python-build-standalone/releases/download"
"""Where uv has its Pythons, which UV_PYTHON_INSTALL_MIRROR replaces
(https://docs.astral.sh/uv/reference/environment/#uv_python_install_mirror)."""
_LOOK_S = 60.0
_SILENT_S = 2400.0
"""How long a build may say nothing: a large package travels, or is unpacked."""

_WAITED = re.compile(r"waiting for a build of .*?, process (\d+): .*", re.DOTALL)


def ensure(
    fleet: Fleet,
    plan: EnvironmentPlan,
    *,
    pythons: Mapping[int, str],
    cache: Path,
    send_files: Callable[[], object] = lambda: None,
) -> dict[int, Environment]:
    """Return each node's environment, made where it is not there; one round trip where it is everywhere.

    `pythons` are the image's, `cache` keeps the versions that are chosen, `send_files` sends the synced
    folder, in which commands of `env.setup` run. Raises NodeError for nodes that failed, each with its last
    lines, and for nodes that differ; ConfigError. Events go where the fleet's go.
    """
    looks = {node: _request(plan, "look", pythons[node]) for node in fleet.nodes}
    found = _ask(fleet, plan, looks, _LOOK_S)
    missing = [node for node, one in found.items() if not one.ready]
    if missing:
        _say_unknown_versions(fleet, plan.projects)
        if plan.setup:
            send_files()
        here = functools.cache(indexes_here)
        chosen = _choose(fleet, plan, found[missing[0]].platform, cache, here)
        with _lent(fleet, chosen, missing, here, signing_key(cache)) as (lent, environs, mirror):
            is_conda = plan.kind == "conda"
            miniforge = mirror.catalog.show(_MINIFORGE, "tree") if is_conda else _MINIFORGE
            builds = {
                node: _request(
                    lent,
                    "build",
                    pythons[node],
                    install={**lent.indexes.environ, **environs.get(node, {})},
                    stamp=plan.stamp,
                    constraints=[*lent.constraints, *_pins(plan, found[node])],
                    miniforge=miniforge + _INSTALLER,
                )
                for node in missing
            }
            found |= _ask(fleet, plan, builds, _SILENT_S, mirror.translate)
        for node in missing:
            torch = found[node].facts.get("torch")
            fleet.on_event(
                Event(f"environment: {plan.name}, torch {torch}", who=node_name(node), fraction=1.0)
            )
    refuse_unlike({node: one.facts for node, one in found.items()})
    return found


def _say_unknown_versions(fleet: Fleet, projects: Sequence[Project]) -> None:
    for project in (one for one in projects if not one.has_version):
        name = project.info.partition("-")[0]
        why = (
            f"{name} has version {UNKNOWN_VERSION} on the nodes: only its build knows another, and none runs"
        )
        fleet.on_event(Event(f"{why}; to set it here: export {SCM_VERSION}_FOR_{name.upper()}=1.0"))


def _choose(
    fleet: Fleet, plan: EnvironmentPlan, platform: Platform | None, cache: Path, here: Callable[[], Indexes]
) -> EnvironmentPlan:
    """Return the plan with the versions that all nodes get; as it is where the nodes are to choose them.

    Raises ConfigError for what cannot be met.
    """
    if not plan.lines or platform is None:
        return plan
    from awsddp.plan.resolve import choose, target_of

    fleet.on_event(Event(f"choosing packages for {plan.name}", ""))
    pins, why = choose(plan, target_of(plan, platform), cache=cache, here=here)
    if why:
        fleet.on_event(Event(f"{plan.name}: {why}; the nodes choose its packages", ""))
    return plan if pins is None or plan.kind == "conda" else replace(plan, lines=pins)


def _pins(plan: EnvironmentPlan, found: Environment) -> tuple[str, ...]:
    platform = found.platform
    return image_constraints(platform.packages) if platform and plan.kind == "image" else ()


@contextlib.contextmanager
def _lent(
    fleet: Fleet, plan: EnvironmentPlan, nodes: Sequence[int], here: Callable[[], Indexes], key: bytes
) -> Iterator[tuple[EnvironmentPlan, Mapping[int, Mapping[str, str]], Mirror]]:
    """Yield what nodes install, the variables by which each finds this machine's mirror, and the mirror.

    All packages come from it, or only those of a folder here and of an index with a password.
    Raises NodesFailed.
    """
    everything, indexes = plan.packages_from == "client", plan.indexes.otherwise(here())
    proxy = plan.environ.get("https_proxy", "")
    catalog = Catalog(everything=everything, key=key)
    with Mirror(catalog, ca=indexes.ca, proxy=proxy) as mirror:
        if plan.packages_from == "node" or not plan.has_packages:
            own = tuple(one for one in indexes.find_links if not is_folder_here(one))
            yield replace(plan, indexes=replace(indexes, find_links=own)), {}, mirror
            return
        lent = _shown(replace(plan, indexes=indexes), catalog)
        if not everything and not catalog.names:
            yield lent, {}, mirror
            return
        trusted = (*indexes.trusted_hosts, *catalog.names)
        lent = replace(lent, indexes=replace(lent.indexes, trusted_hosts=trusted))
        if everything:
            fleet.on_event(Event("packages come through this machine", ""))
        own_programs = _programs(plan, catalog) if everything else {}
        urls = urls_in(json.dumps(asdict(lent)))
        with fleet.forwarded(nodes, mirror.serve) as ports:
            yield (
                lent,
                {node: mirror.environ(port, urls) | own_programs for node, port in ports.items()},
                mirror,
            )


def _shown(plan: EnvironmentPlan, catalog: Catalog) -> EnvironmentPlan:
    """Return a plan with the names by which nodes find its indexes, repositories, files and channels."""
    indexes = plan.indexes
    if catalog.everything and not indexes.no_index:
        indexes = replace(indexes, index_url=indexes.index_url or _PYPI)
    torch = plan.torch[: 2 if indexes.no_index else None]
    return replace(
        plan,
        indexes=replace(
            indexes,
            index_url=catalog.show_index(indexes.index_url),
            extra_index_urls=tuple(map(catalog.show_index, indexes.extra_index_urls)),
            find_links=tuple(map(catalog.show_links, indexes.find_links)),
        ),
        torch=tuple(catalog.show_index(one.replace("--index", "--extra-index")) for one in torch)
        if catalog.everything
        else plan.torch,
        lines=tuple(map(catalog.show_line, plan.lines)),
        constraints=tuple(map(catalog.show_line, plan.constraints)),
        conda=catalog.show_conda(plan.conda) if plan.conda else "",
    )


def _programs(plan: EnvironmentPlan, catalog: Catalog) -> dict[str, str]:
    """Return the variables by which uv and conda find what they fetch besides packages."""
    if plan.kind == "conda":
        return catalog.conda_environ()
    return {"UV_PYTHON_INSTALL_MIRROR": catalog.show(_UV_PYTHONS, "tree")} if plan.kind == "venv" else {}


def _request(plan: EnvironmentPlan, do: str, image: str, **more: object) -> Request:
    """Return the request to "look" whether the environment is there, or to "build" it."""
    asked = {
        **asdict(plan),
        "ca": plan.indexes.ca,
        "stamp": plan.stamp,
        "setup_stamp": plan.setup_stamp,
        "do": do,
        "client": _client(),
        "image": image,
        **more,
    }
    # By stdin: an index URL may hold a password, and everybody on a node may read a command line.
    return ["python3", "-I", "-S", "-c", template("environment.py")], json.dumps(asked).encode()


def _client() -> str:
    """Return how those who wait for a build of this client are told of it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class _Step(msgspec.Struct, frozen=True):
    """A line of a program: what it does now, with how much of how many bytes; or else its answer."""

    at: str | None = None
    fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    size: Count | None = None


def answers(
    fleet: Fleet,
    requests: Mapping[int, Request],
    kind: type[Answer],
    *,
    failed: str,
    silent_s: float,
    translate: Callable[[str], str] = str,
) -> dict[int, Answer | NodeError]:
    """Run programs that say JSON, a line each: what they do, which events tell, and at last their answers.

    `failed` is the error of a node that gives none. Nothing is raised for what a node says.
    """
    said = {node: bytearray() for node in requests}
    last: dict[int, bytes] = {}

    def on_data(node: int, data: bytes) -> None:
        take(said[node], data, node=node)
        *lines, said[node] = said[node].split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # what a login shell's own files print is no JSON
                step = msgspec.json.decode(line, type=_Step)
                if step.at is None:
                    last[node] = bytes(line)
                else:
                    text = translate(step.at).partition("\n")[0][:200]
                    fleet.on_event(Event(text, who=node_name(node), fraction=step.fraction, size=step.size))

    def outcome(node: int, end: Result | NodeError) -> Answer | NodeError:
        if isinstance(end, NodeError):
            return end
        if node not in last:
            return NodeFailure(node, "command", failed, end.tail())
        try:
            return read_answer(last[node], kind, node=node)
        except NodeError as error:
            return error

    ends = fleet.stream(requests, on_data, silent_after_s=silent_s)
    return {node: outcome(node, end) for node, end in ends.items()}


def _ask(
    fleet: Fleet,
    plan: EnvironmentPlan,
    requests: Mapping[int, Request],
    silent_s: float,
    translate: Callable[[str], str] = str,
) -> dict[int, Environment]:
    failed = "its environment could not be created"
    told = answers(fleet, requests, Environment, failed=failed, silent_s=silent_s, translate=translate)
    return split({node: _outcome(plan, node, one, translate) for node, one in told.items()})


def _outcome(
    plan: EnvironmentPlan, node: int, found: Environment | NodeError, translate: Callable[[str], str]
) -> Environment | NodeError:
    if isinstance(found, NodeError) or not found.failed:
        return found
    if found.failed in plan.setup:
        return NodeFailure(
            node, "command", f"env.setup: {found.failed!r} failed", tail(found.said), "correct the command"
        )
    if waited := _WAITED.fullmatch(found.failed):
        advice = f"awsddp exec --node {node} -- kill {waited[1]}   # ends that build; then repeat the command"
        return NodeFailure(node, "command", found.failed, found.said, advice)
    name = "[env]" if plan.name == plan.kind else plan.name
    said = translate(found.said)
    refusal = explain(said, name=name, internet=plan.internet, packages_from=plan.packages_from)
    return NodeFailure(node, "command", f"{found.failed}: {refusal.message}", refusal.why, refusal.next)
