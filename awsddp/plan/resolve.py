"""Choose package versions with uv on this machine, so that unmet requirements fail before a launch."""

import functools
import hashlib
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from awsddp.compat.releases import RELEASES, find_release
from awsddp.errors import ConfigError
from awsddp.model.node_answers import Platform
from awsddp.plan.environment import EnvironmentPlan, pin_image_packages
from awsddp.plan.indexes import CREDENTIALS, Indexes, is_local_folder, read_pip_indexes
from awsddp.plan.requirements import IMAGE_PACKAGES, normalize_name, parse_name
from awsddp.plan.uv import UvOutput, run_uv, write_python_without_builds

_GLIBC = (*range(40, 30, -1), 28, 17)
"""The minor glibc releases for which uv has a platform
(https://docs.astral.sh/uv/reference/cli/#uv-pip-compile).
"""
_PATCHES = 10
_OPTIONS = "asked -c fixed --overrides replaced --no-header --no-annotate --format requirements.txt"
_BAD_LINE = re.compile(r"Couldn't parse|.*\basked:(\d+):\d+$")
_POSITION = re.compile(r"Couldn't parse .*? position \d+ |(?: at|:) \S*asked:\S+$")
_UNMET = re.compile(r"No solution found when resolving dependencies:? Because (.*)")
_STEP = re.compile(
    r":? Because |, we can conclude that .*? (?:cannot be used|are incompatible)\. (?:And because )?"
)
_CONCLUSION = ", we can conclude that your requirements are unsatisfiable."
_BUILD = re.compile(r"^(torch(?:vision|audio)?\b[^+]*)\+[\w.]+")
"""A torch requirement with a build, such as +cu130. The build is removed from the requirement, because the
image's torch is kept, whatever its build is.
"""
_NO_EXTRA = re.compile(r"The package `([^`=]+)==\S+ does not have an extra named")
_BUILT = re.compile("no usable wheels|building from source is disabled|Building source distributions")
_TO_BUILD = re.compile(r"Failed to (?:build|download and build) `([^`]+)`")
_CACHE_FILES = 50
"""The maximum number of cached choices."""
_CACHE_VERSION = 2
"""The cache's version, a part of each key: a choice with another version is never used."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The platform that packages are chosen for: its Python, its machine, the packages that it `has` and the
    pins that are `fixed`.

    If `exact` is True, the platform is that of a real node, and the versions installed there are preferred.
    """

    python: str
    machine: str
    glibc: int = _GLIBC[0]
    has: tuple[tuple[str, str], ...] = ()
    fixed: tuple[str, ...] = ()
    exact: bool = False


def make_target(plan: EnvironmentPlan, platform: Platform) -> Target:
    """Return the target for a plan's packages on a node with this platform."""
    fixed = _torch_pins(plan)
    has, is_image, packages = _pinned_releases(fixed), plan.kind == "image", platform.packages.items()
    return Target(
        python=plan.python or platform.version,
        machine=platform.machine,
        glibc=int((platform.libc or "2.28").split(".")[1]),
        has=tuple((normalize_name(name), version) for name, version in packages) if is_image else has,
        fixed=pin_image_packages(platform.packages) if is_image else fixed,
        exact=plan.kind != "conda",
    )


def check_packages(plan: EnvironmentPlan, *, image_torch: str | None, machine: str, cache: Path) -> str:
    """Raise ConfigError, before a launch, for packages that are known not to be installable on any node.

    Returns "", or the reason if uv could not check the packages; in that case no error is raised. Packages
    that a node must build, and packages from a URL, are not checked. An image's Python version is unknown, so
    the packages must be installable for at least one of the versions that the image's torch supports.
    """
    row = find_release(image_torch or "")
    fixed = _torch_pins(plan)
    if row and plan.kind == "image":
        fixed = (f"torch=={row.torch}.*", f"torchaudio=={row.torch}.*", f"torchvision=={row.torchvision}.*")
    pythons, read_indexes = (row or RELEASES[0]).pythons, functools.cache(read_pip_indexes)
    without_urls = replace(plan, lines=tuple(line for line in plan.lines if "://" not in line))
    for python in [plan.python] if plan.python else [pythons[-1], pythons[0]]:
        target = Target(python=python, machine=machine, has=_pinned_releases(fixed), fixed=fixed)
        try:
            return choose_packages(without_urls, target, cache=cache, read_indexes=read_indexes)[1]
        except ConfigError as error:
            failure = error
    raise failure


def choose_packages(
    plan: EnvironmentPlan,
    target: Target,
    *,
    cache: Path,
    read_indexes: Callable[[], Indexes] = read_pip_indexes,
) -> tuple[tuple[str, ...] | None, str]:
    """Return (pins, ""). The pins meet a plan's lines and leave out packages that the target has.

    The choice is cached in `cache`, so that later nodes get the same versions. Returns (None, reason) if uv
    cannot choose, because no index responds or because a package's dependencies are known only after a build.
    Raises ConfigError for requirements that cannot be met.
    """
    key = hashlib.sha256(
        json.dumps([_CACHE_VERSION, plan.stamp, plan.lines, repr(target)]).encode()
    ).hexdigest()[:16]
    cache_file = cache / f"{key}.txt"
    if not plan.lines:
        return (), ""
    if cache_file.exists():
        return tuple(cache_file.read_text().splitlines()), ""
    with tempfile.TemporaryDirectory() as scratch:
        pins, why = _compile(plan, target, plan.indexes.with_defaults(read_indexes()), Path(scratch))
    text = "".join(f"{pin}\n" for pin in pins or ())
    if pins is not None and not CREDENTIALS.search(text):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache_file.write_text(text)
        for old in sorted(cache.glob("*.txt"), key=lambda file: file.stat().st_mtime)[:-_CACHE_FILES]:
            old.unlink(missing_ok=True)
    return pins, why


def _compile(
    plan: EnvironmentPlan, target: Target, indexes: Indexes, scratch: Path
) -> tuple[tuple[str, ...] | None, str]:
    has = scratch / "has"
    folders = [str(Path(link).absolute()) if is_local_folder(link) else link for link in indexes.find_links]
    env = {**plan.environ, **replace(indexes, find_links=(str(has), *folders)).environ}
    if indexes.ca:
        (scratch / "ca.pem").write_text(indexes.ca)
        env["SSL_CERT_FILE"] = str(scratch / "ca.pem")
    has.mkdir()
    for name, version in target.has:
        _write_stub(has, name, version)
    preferred = [f"{name}=={version}" for name, version in target.has] if target.exact else []
    files = {
        "asked": [_BUILD.sub(r"\1", line) for line in plan.lines],
        "fixed": [*plan.constraints, *target.fixed],
        "replaced": [],
        **dict.fromkeys(("of-wheels", "chosen"), preferred),
    }
    if not (target.fixed or target.exact):  # any torch meets the requirements
        _write_stub(has, "torch", "9999")
        files["replaced"] = ["torch==9999"]
    for name, lines in files.items():
        (scratch / name).write_text("".join(f"{line}\n" for line in lines))
    arguments = f"pip compile {_OPTIONS} --python-version {target.python} --python-platform".split()
    glibc = next((minor for minor in _GLIBC if minor <= target.glibc), _GLIBC[-1])
    arguments += [f"{target.machine}-manylinux_2_{glibc}", *["--no-index"] * indexes.no_index]

    def run_compile(output: str, how: str) -> UvOutput:
        while True:
            python = sys.executable if how == "--no-build" else write_python_without_builds(scratch)
            result = run_uv([*arguments, "-o", output, how], env, folder=scratch, python=python)
            stubs = [
                stub
                for name in map(normalize_name, _NO_EXTRA.findall(result.stderr))
                for stub in has.glob(f"{name.replace('-', '_')}-*.whl")
                if not IMAGE_PACKAGES.fullmatch(name)
            ]
            if not stubs:
                return result
            for stub in stubs:
                stub.unlink()  # only the package's own wheel lists its extras' dependencies

    # If uv may use only wheels, it silently chooses a years-old release when a newer release, or one of its
    # dependencies, has no wheel. If uv may also use source distributions, it would run the code of a package
    # whose metadata does not list the dependencies.
    output, result, unbuilt = "of-wheels", UvOutput(failure="not run"), None
    if indexes.prefer_binary:
        result = run_compile(output, "--no-build")
    if result.failure:
        output = "chosen"
        result = run_compile(output, "--no-build-isolation")
        unbuilt = _TO_BUILD.search(result.failure)
    if unbuilt:  # the requirements may conflict even without the package's dependencies
        result = run_compile("of-wheels", "--no-build")
        if not result.failure or _BUILT.search(result.failure):
            return None, f"a node must build {CREDENTIALS.sub('//', unbuilt[1])}"
    is_open = indexes.no_index and not target.exact and "provided package loc" in result.failure
    if result.failure:
        return None, "" if is_open else _explain(result.failure, plan, target)
    pins = (scratch / output).read_text().splitlines()
    return tuple(pin for pin in pins if (parse_name(pin), pin.partition("==")[2]) not in target.has), ""


def _explain(failure: str, plan: EnvironmentPlan, target: Target) -> str:
    """Return the reason why uv cannot choose versions. Raises ConfigError for requirements that cannot be met
    or are invalid.
    """
    text = CREDENTIALS.sub("//", failure)
    lines = (*plan.lines, *plan.constraints)
    if bad := _BAD_LINE.match(text):
        line = next((line for line in lines if line in text), lines[int(bad[1] or 1) - 1])
        raise ConfigError(
            f"env.file: {plan.locations.get(line, plan.name)}: {line!r} is not a requirement",
            _POSITION.sub("", text),
            "expected a name, optionally with a version (==1.2), or with @ and a URL",
        )
    summary, _, hint = text.partition(" hint: ")
    unmet = _UNMET.match(summary)
    if unmet is None:
        return text
    if "40" in hint and "credentials" in hint:
        raise ConfigError(f"{plan.name}: a package index rejected the credentials", hint, "correct its URL")
    why = _STEP.sub("; ", unmet[1].removesuffix(_CONCLUSION))
    mentioned = {normalize_name(name) for name in re.findall(r"[A-Za-z0-9][\w.-]*\w|\w", why)}
    blamed = [line for line in lines if parse_name(line) in mentioned][:3]
    location = ", ".join(dict.fromkeys(plan.locations.get(line, plan.name) for line in blamed)) or plan.name
    fault = "exclude each other" if len(blamed) > 1 else "cannot be met"
    advice = "correct the file, and repeat the command"
    for package, _, version in (pin.partition("==") for pin in target.fixed):
        if normalize_name(package) in mentioned and plan.kind == "image":
            has = version.removesuffix(".*")
            fault = f"needs another {package} than the image's {has}"
            advice = (
                f"require versions that work with {package} {has}, or use a separate Python: -o env.kind=venv"
            )
    raise ConfigError(f"env.file: {location}: {' and '.join(blamed)} {fault}", why, advice)


def _torch_pins(plan: EnvironmentPlan) -> tuple[str, ...]:
    """Return the pins of torch and torchvision, which a separate Python gets first."""
    return tuple(requirement for requirement in plan.torch if "==" in requirement)


def _pinned_releases(fixed: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each pinned package with every release that its pin allows."""
    pins = [pin.partition("==") for pin in fixed]
    numbers = [("", *map(str, range(_PATCHES))) if of.endswith("*") else ("",) for _, _, of in pins]
    return tuple(
        (name, f"{of.removesuffix('.*')}.{number}".removesuffix("."))
        for (name, _, of), several in zip(pins, numbers, strict=True)
        for number in several
    )


def _write_stub(folder: Path, name: str, version: str) -> None:
    """Write an empty wheel that takes the place of an installed package."""
    base = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{base}.dist-info/METADATA", metadata)
        wheel.writestr(f"{base}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{base}.dist-info/RECORD", "")
