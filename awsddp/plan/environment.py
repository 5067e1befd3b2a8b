"""Plan the ranks' environment from [env], as pure data, and explain why its installation failed."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from awsddp.compat.releases import RELEASES, Release, find_release, least_driver
from awsddp.errors import ConfigError, NodeError
from awsddp.plan.indexes import CREDENTIALS, Indexes, is_local_folder
from awsddp.plan.project import Project
from awsddp.plan.requirements import IMAGE_PACKAGES, Requirements, read_requirements
from awsddp.settings.spec import EnvSection
from awsddp.util.formatting import node_name

TORCH_INDEX = "https://download.pytorch.org/whl"
PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")
_TORCH = "2.13"
"""The newest release with a confirmed torchvision (RELEASES)."""
_PINNED = re.compile(r"torch\s*[=~]=\s*(\d+\.\d+(?:\.\d+)?)")
_VENV = "-o env.kind=venv"


@dataclass(frozen=True, kw_only=True)
class EnvironmentPlan(Requirements):
    """The environment to create on each node, and the requirements from its file.

    `environ` has the environment variables for pip, uv, conda and the job; `variables` has those that an
    environment.yml sets, which only the job gets. `internet` is None if it is unknown whether the nodes have
    internet access.
    """

    kind: Literal["image", "venv", "conda"] = "image"
    name: str = ""
    python: str | None = None
    torch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages_from: Literal["node", "client"] | None = None
    """Which packages this machine sends to the nodes: all ("client"), none ("node"), or those from its own
    folders and from indexes with passwords (None).
    """
    internet: bool | None = None

    @property
    def has_packages(self) -> bool:
        """True if packages are installed; otherwise the image's Python runs the ranks."""
        return self.kind != "image" or bool(self.lines or self.projects)

    @property
    def stamp(self) -> str:
        """The hash of everything that the environment depends on, except credentials and proxies."""
        inputs = [self.kind, self.lines, self.constraints, self.conda, self.python, self.torch]
        indexes = dataclasses.replace(self.indexes, ca="")
        projects = [dataclasses.asdict(project) for project in self.projects]
        text = CREDENTIALS.sub("//", json.dumps([*inputs, dataclasses.asdict(indexes), *projects]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def setup_stamp(self) -> str:
        """A hash of the setup commands."""
        return hashlib.sha256(json.dumps(self.setup).encode()).hexdigest()[:16]


def make_environment_plan(
    env: EnvSection, *, internet: bool | None, driver: str | None, workdir: Path = Path()
) -> EnvironmentPlan:
    """Return the plan for [env] with the requirements in its file; `resolve.py` checks whether they can be
    met.

    `internet` is True if the nodes have internet access, or None if that is unknown; `driver` is the nodes'
    NVIDIA driver (None: no GPU); `workdir` is the project folder. Raises ConfigError if the settings
    conflict.
    """
    requirements = read_requirements(Path(env.file).expanduser()) if env.file else Requirements()
    kind = env.kind or ("conda" if requirements.conda else "image")
    _check_kind(env, kind, is_conda_file=bool(requirements.conda))
    packages_from = env.packages_from or ("client" if internet is False else None)
    torch = () if kind == "image" or requirements.conda else _torch_arguments(env, requirements, driver)
    indexes = Indexes(index_url=env.index_url or "", ca=_read_ca(env)).with_defaults(requirements.indexes)
    if packages_from == "node":
        _check_folders(indexes.find_links)
    is_image_python = kind == "venv" and packages_from == "client"  # another Python is too large to send
    projects = _synced_projects(requirements.projects, workdir)
    return EnvironmentPlan(
        **vars(dataclasses.replace(requirements, indexes=indexes, projects=projects)),
        kind=kind,
        name=env.file or kind,
        python=env.python or (None if kind == "image" or is_image_python else _python(requirements)),
        torch=torch,
        setup=env.setup,
        environ=_environ(env),
        packages_from=packages_from,
        internet=internet,
    )


def _synced_projects(projects: Sequence[Project], workdir: Path) -> tuple[Project, ...]:
    """Return the projects that are in the project folder, with source folders relative to that folder."""
    root = workdir.resolve()
    synced = []
    for project in projects:
        sources = [Path(source) for source in project.sources]
        if all(source.is_relative_to(root) for source in sources):
            relative = tuple(source.relative_to(root).as_posix() for source in sources)
            synced.append(dataclasses.replace(project, sources=relative))
    return tuple(synced)


def _check_kind(env: EnvSection, kind: str, *, is_conda_file: bool) -> None:
    """Raise ConfigError for an env.python or env.kind that conflicts with the file or the image."""
    if env.python is not None and not PYTHON.fullmatch(env.python):
        raise ConfigError(f"env.python: invalid Python version {env.python!r}", "", "use 3.12 or 3.12.4")
    if kind == "image" and env.python is not None:
        raise ConfigError(
            'env.python cannot be set with env.kind = "image"',
            "the image has its own Python",
            'env.kind = "venv"',
        )
    if is_conda_file and kind != "conda":
        raise ConfigError(
            f'env.kind = "{kind}": {env.file} is a conda environment',
            "",
            "omit env.kind, or use another --env",
        )
    if is_conda_file and env.python:
        raise ConfigError(
            f"env.python cannot be set for {env.file}",
            "an environment.yml lists all of its packages, Python included",
            f"write '- python={env.python}' into {env.file}, and remove env.python: -o env.python=",
        )


def _check_folders(find_links: Sequence[str]) -> None:
    """Raise ConfigError if packages are in a folder on this machine: the nodes fetch packages themselves."""
    for folder in filter(is_local_folder, find_links):
        raise ConfigError(
            f"--find-links {folder!r} is a folder of this machine",
            "the nodes fetch packages themselves",
            "omit env.packages_from   # or name the absolute path of a folder on the nodes",
        )


def _release(requirements: Requirements) -> str:
    """Return the torch version that the requirements file pins, or else the newest release."""
    pins = filter(None, map(_PINNED.match, requirements.lines))
    return next((pin[1] for pin in pins), _TORCH)


def _python(requirements: Requirements) -> str:
    row = find_release(_release(requirements))
    return row.pythons[len(row.pythons) // 2] if row else "3.12"


def _torch_arguments(env: EnvSection, requirements: Requirements, driver: str | None) -> tuple[str, ...]:
    """Return the arguments that make pip install torch for the newest CUDA that the driver supports."""
    pinned = _release(requirements)
    row = find_release(pinned)
    if row is None:
        known_releases = f"the known releases are {RELEASES[-1].torch} to {RELEASES[0].torch}"
        raise ConfigError(f"{env.file}: unknown torch release {pinned!r}", known_releases)
    if env.python and ".".join(env.python.split(".")[:2]) not in row.pythons:
        raise ConfigError(
            f"env.python: torch {row.torch} has no wheel for Python {env.python}",
            f"it has wheels for Python {', '.join(row.pythons)}",
        )
    version = pinned if pinned.count(".") == 2 else f"{row.torch}.*"
    names = (f"torch=={version}", f"torchvision=={row.torchvision}.*")
    if env.index_url or requirements.indexes.find_links:
        return names
    return (*names, "--index-url", f"{TORCH_INDEX}/{_build(row, driver)}")


def _build(row: Release, driver: str | None) -> str:
    """Return the torch build ("cu130") for the driver's newest CUDA, or "cpu" if there is no driver."""
    if driver is None:
        return "cpu"
    supported = [cuda for cuda in row.wheels if least_driver(cuda) <= int(driver.split(".")[0])]
    if not supported:
        raise ConfigError(
            f"torch {row.torch} has no wheel for the nodes' driver {driver}",
            f"it has wheels for CUDA {', '.join(row.wheels)}",
            "pin an older torch in the file of --env, or choose another image",
        )
    return "cu" + supported[-1].replace(".", "")


def _environ(env: EnvSection) -> dict[str, str]:
    if not env.proxy:
        return {}
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    direct = "localhost,127.0.0.1,169.254.169.254"  # the last address serves the instance's metadata
    return dict.fromkeys(names, env.proxy) | {"no_proxy": direct, "NO_PROXY": direct}


def _read_ca(env: EnvSection) -> str:
    if not env.ca_bundle:
        return ""
    try:
        return Path(env.ca_bundle).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"env.ca_bundle: {env.ca_bundle} cannot be read", str(error)) from error


def pin_image_packages(packages: Mapping[str, str]) -> tuple[str, ...]:
    """Return pins for the packages that belong to the image's torch, so that they are never replaced."""
    return tuple(
        f"{name}=={version}"
        for name, version in sorted(packages.items())
        if IMAGE_PACKAGES.fullmatch(name.lower())
    )


_UNREACHED = re.compile(
    "NewConnectionError|ConnectTimeout|ReadTimeout|Name or service not known|Temporary failure in name|"
    "ProxyError|SSLError|dns error|error sending request|operation timed out|CondaHTTPError|"
    r"Could not resolve host|not reached from here|curl: \((?:5|6|7|28|35|56)\)"
)

_RETRY = re.compile(r"^\s*WARNING: (?:Retrying|You are using pip)|^\s*\[notice\]")
_NOT_BUILT = re.compile(r"(?i)failed (?:to build|building wheel for) [`'\"]?([\w.-]*\w)")
_NOT_IN_CHANNEL = re.compile(
    r"nothing provides (?:requested )?(?P<libmamba>[^\s=<>!~]+)|"
    r"(?P<tree>[\w.-]+)[^\n]* does not exist \(perhaps|"
    r"not available from current channels:\s+- (?P<classic>[^\s=<>!~]+)|"
    r"No candidates were found for (?P<rattler>[^\s=<>!~]+)|"
    r"(?P<deep>[\w.-]+)[^\n]*, for which no candidates were found"
)
"""Messages from conda's solvers: two from libmamba, one from the classic solver, two from rattler."""
_FOLDER = "or put its wheel into a folder: --find-links FOLDER"
_OTHERWISE = f"{_FOLDER}\n-o env.packages_from=node   # if the nodes can reach it"
# Each row has a pattern for an installer's messages, awsddp's message and the next step. {name} is the file
# that lists the packages, and {package} is the text that a group in the pattern matched.
_KNOWN_FAILURES = (
    (
        re.compile(r"(\S+): no packages come from there"),
        "{name}: a package needs {package}, where none of its indexes has files",
        f"list the package from there by its URL in {{name}}, {_OTHERWISE}",
    ),
    (
        re.compile(r"(\S+): its address is not public"),
        "{name}: an index page leads to {package}, whose address is not public",
        f"--find-links URL   # add it to {{name}} if that host may serve packages to nodes; {_OTHERWISE}",
    ),
    (
        re.compile(r"(\S+): no configuration names it, and a proxy resolves it"),
        "{name}: an index page leads to {package}, whose address only the proxy knows",
        f"--find-links URL   # add it to {{name}} if that host may serve packages to nodes; {_OTHERWISE}",
    ),
    (
        re.compile(r"(\S+): a link that leads out of its folder"),
        "{name}: {package} is a link that leads out of its folder",
        "replace the link with the file itself",
    ),
    (
        re.compile(r"(\S+): only what the configuration names"),
        "{name}: a package needs {package}, which no line, index or channel names",
        f"add a line for it to {{name}}, {_OTHERWISE}",
    ),
    (
        re.compile("No space left on device"),
        "a disk is full",
        "awsddp exec -- df -h   # shows the disks; cluster.disk_gb sets the root disk's size",
    ),
    (
        _UNREACHED,
        "the package index does not answer",
        "check env.index_url, env.proxy and env.ca_bundle\n"
        "-o env.packages_from=client   # where nodes have no internet",
    ),
    (
        re.compile("No interpreter found|No download found for request"),
        "Python version not found",
        "choose another env.python, or omit it to use the image's own",
    ),
    (
        re.compile(r"No matching distribution found for ([^\s(]+)"),
        "{name}: no {package} for this Python",
        "correct it in {name}, and repeat the command",
    ),
    (
        _NOT_IN_CHANNEL,
        "{name}: no channel has a {package} that fits",
        "correct its version in {name}, or add the channel that has it, and repeat the command",
    ),
    (
        re.compile("following packages are incompatible|cannot be installed because|UnsatisfiableError"),
        "{name}: its packages have conflicting versions",
        "loosen their versions in {name}, and repeat the command",
    ),
)


def explain_failure(
    output: str, *, name: str, internet: bool | None = None, packages_from: str | None = None
) -> NodeError:
    """Return the error for a failed installation, based on the output of pip, uv or conda.

    `name` is the file that lists the packages. The error omits next steps that set `packages_from` to its
    current value. If the nodes have no `internet` access, it also omits next steps that need such access.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip() and not _RETRY.search(line)]
    tail = "\n".join(list(dict.fromkeys(lines))[-10:])
    for pattern, message, advice in _KNOWN_FAILURES:
        if match := pattern.search(output):
            package = next(filter(None, match.groups()), "")
            why = next((line for line in reversed(lines) if pattern.search(line)), lines[-1] if lines else "")
            useless = [
                f"env.packages_from={packages_from} ",
                *["env.packages_from=node "] * (internet is False),
            ]
            steps = [step for step in advice.split("\n") if not any(option in step for option in useless)]
            values = {"name": name, "package": package}
            return NodeError(message.format(**values), why, "\n".join(steps).format(**values))
    if built := _NOT_BUILT.search(output):
        message = f"{name}: {built[1]} has no wheel that fits, and its build on the node failed"
        return NodeError(
            message, tail, "env.setup in awsddp.toml   # a command there can install what the build needs"
        )
    return NodeError(f"{name} could not be installed", tail, f"correct {name}, and repeat the command")


def check_identical_nodes(facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise NodeError if `facts`, which maps node numbers to facts, differs between nodes."""
    names = dict.fromkeys(name for node_facts in facts.values() for name in node_facts)
    different = [
        f"{name}: "
        + ", ".join(
            f"{node_name(node)} {node_facts.get(name) or 'none'}"
            for node, node_facts in sorted(facts.items())
        )
        for name in names
        if len({str(node_facts.get(name)) for node_facts in facts.values()}) > 1
    ]
    if different:
        raise NodeError(
            "the nodes differ; a job needs identical nodes",
            "\n".join(different),
            "awsddp down && awsddp up   # with one image and one instance type",
        )
