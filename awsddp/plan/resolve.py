"""Chooses the packages of a project, here and by uv: what cannot be met is refused before it costs."""

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

from awsddp.compat.releases import RELEASES, release
from awsddp.errors import ConfigError
from awsddp.model.node_answers import Platform
from awsddp.plan.environment import EnvironmentPlan, image_constraints
from awsddp.plan.indexes import CREDENTIALS, Indexes, indexes_here, is_folder_here
from awsddp.plan.requirements import IMAGE_PACKAGES, canonical, name_of
from awsddp.plan.uv import Said, python_without_builds, run_uv

_GLIBC = (*range(40, 30, -1), 28, 17)
"""The minor releases that uv has a platform for (https://docs.astral.sh/uv/reference/cli/#uv-pip-compile)."""
_PATCHES = 10
_OPTIONS = "asked -c fixed --overrides replaced --no-header --no-annotate --format requirements.txt"
_BAD_LINE = re.compile(r"Couldn't parse|.*\basked:(\d+):\d+$")
_PLACE = re.compile(r"Couldn't parse .*? position \d+ |(?: at|:) \S*asked:\S+$")
_UNMET = re.compile(r"No solution found when resolving dependencies:? Because (.*)")
_STEP = re.compile(
    r":? Because |, we can conclude that .*? (?:cannot be used|are incompatible)\. (?:And because )?"
)
_SO = ", we can conclude that your requirements are unsatisfiable."
_BUILD = re.compile(r"^(torch(?:vision|audio)?\b[^+]*)\+[\w.]+")
"""A torch with its build, as +cu130: the image's has another, and stays."""
_NO_EXTRA = re.compile(r"The package `([^`=]+)==\S+ does not have an extra named")
_BUILT = re.compile("no usable wheels|building from source is disabled|Building source distributions")
_TO_BUILD = re.compile(r"Failed to (?:build|download and build) `([^`]+)`")
_KEPT = 50
"""How many choices are kept."""
_FORM = 2
"""How versions are chosen: a choice that an older awsddp has kept, of wheels alone, is not used."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What packages must fit: a Python, a machine, and what it `has`, of which the `fixed` stay.

    An exact one is a node that was asked: what its image has is preferred.
    """

    python: str
    machine: str
    glibc: int = _GLIBC[0]
    has: tuple[tuple[str, str], ...] = ()
    fixed: tuple[str, ...] = ()
    exact: bool = False


def target_of(plan: EnvironmentPlan, platform: Platform) -> Target:
    """Return what the packages of a plan must fit on a node that was asked."""
    fixed = _torch_of(plan)
    has, is_image = _releases(fixed), plan.kind == "image"
    return Target(
        python=plan.python or platform.version,
        machine=platform.machine,
        glibc=int((platform.libc or "2.28").split(".")[1]),
        has=tuple((canonical(name), of) for name, of in platform.packages.items()) if is_image else has,
        fixed=image_constraints(platform.packages) if is_image else fixed,
        exact=plan.kind != "conda",
    )


def check(plan: EnvironmentPlan, *, image_torch: str | None, machine: str, cache: Path) -> str:
    """Refuse packages that no node could get, as far as that is known before a launch.

    Returns "", or why uv could not tell: nothing is refused then. A package that a node must build, and what
    a URL names, is left to the nodes. The Python of an image is not known: one of its torch's must do.
    Raises ConfigError.
    """
    row = release(image_torch or "")
    fixed = _torch_of(plan)
    if row and plan.kind == "image":
        fixed = (f"torch=={row.torch}.*", f"torchaudio=={row.torch}.*", f"torchvision=={row.torchvision}.*")
    pythons, here = (row or RELEASES[0]).pythons, functools.cache(indexes_here)
    named = replace(plan, lines=tuple(one for one in plan.lines if "://" not in one))
    for python in [plan.python] if plan.python else [pythons[-1], pythons[0]]:
        target = Target(python=python, machine=machine, has=_releases(fixed), fixed=fixed)
        try:
            return choose(named, target, cache=cache, here=here)[1]
        except ConfigError as error:
            refused = error
    raise refused


def choose(
    plan: EnvironmentPlan, target: Target, *, cache: Path, here: Callable[[], Indexes] = indexes_here
) -> tuple[tuple[str, ...] | None, str]:
    """Return the versions that meet a plan's lines, without what the target has, and "".

    They are chosen once and kept below `cache`: nodes that come later get the same. None, and why, where uv
    cannot tell: no index answers, or what a package needs is known only once a node has built it. Raises
    ConfigError for what cannot be met.
    """
    key = hashlib.sha256(json.dumps([_FORM, plan.stamp, plan.lines, repr(target)]).encode()).hexdigest()[:16]
    kept = cache / f"{key}.txt"
    if not plan.lines:
        return (), ""
    if kept.exists():
        return tuple(kept.read_text().splitlines()), ""
    with tempfile.TemporaryDirectory() as scratch:
        found, why = _chosen(plan, target, plan.indexes.otherwise(here()), Path(scratch))
    text = "".join(f"{one}\n" for one in found or ())
    if found is not None and not CREDENTIALS.search(text):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept.write_text(text)
        for old in sorted(cache.glob("*.txt"), key=lambda one: one.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
    return found, why


def _chosen(
    plan: EnvironmentPlan, target: Target, indexes: Indexes, scratch: Path
) -> tuple[tuple[str, ...] | None, str]:
    has = scratch / "has"
    folders = [str(Path(one).absolute()) if is_folder_here(one) else one for one in indexes.find_links]
    env = {**plan.environ, **replace(indexes, find_links=(str(has), *folders)).environ}
    if indexes.ca:
        (scratch / "ca.pem").write_text(indexes.ca)
        env["SSL_CERT_FILE"] = str(scratch / "ca.pem")
    has.mkdir()
    for name, version in target.has:
        _stub(has, name, version)
    preferred = [f"{name}=={version}" for name, version in target.has] if target.exact else []
    files = {
        "asked": [_BUILD.sub(r"\1", one) for one in plan.lines],
        "fixed": [*plan.constraints, *target.fixed],
        "replaced": [],
        **dict.fromkeys(("of-wheels", "chosen"), preferred),
    }
    if not (target.fixed or target.exact):  # any torch does
        _stub(has, "torch", "9999")
        files["replaced"] = ["torch==9999"]
    for name, lines in files.items():
        (scratch / name).write_text("".join(f"{one}\n" for one in lines))
    words = f"pip compile {_OPTIONS} --python-version {target.python} --python-platform".split()
    glibc = next((one for one in _GLIBC if one <= target.glibc), _GLIBC[-1])
    words += [f"{target.machine}-manylinux_2_{glibc}", *["--no-index"] * indexes.no_index]

    def compiled(output: str, how: str) -> Said:
        while True:
            python = sys.executable if how == "--no-build" else python_without_builds(scratch)
            said = run_uv([*words, "-o", output, how], env, folder=scratch, python=python)
            stubs = [
                stub
                for name in map(canonical, _NO_EXTRA.findall(said.told))
                for stub in has.glob(f"{name.replace('-', '_')}-*.whl")
                if not IMAGE_PACKAGES.fullmatch(name)
            ]
            if not stubs:
                return said
            for stub in stubs:
                stub.unlink()  # the package's own wheel says what its extras need

    # Held to wheels, uv takes a release of years ago, without a word, where a newer one or what that needs
    # has none. Where metadata does not say what such a package needs, uv would run its code.
    output, said, unbuilt = "of-wheels", Said(failure="not run"), None
    if indexes.prefer_binary:
        said = compiled(output, "--no-build")
    if said.failure:
        output = "chosen"
        said = compiled(output, "--no-build-isolation")
        unbuilt = _TO_BUILD.search(said.failure)
    if unbuilt:  # whatever it needs: what else is asked for may exclude each other
        said = compiled("of-wheels", "--no-build")
        if not said.failure or _BUILT.search(said.failure):
            return None, f"a node must build {CREDENTIALS.sub('//', unbuilt[1])}"
    is_open = indexes.no_index and not target.exact and "provided package loc" in said.failure
    if said.failure:
        return None, "" if is_open else _explained(said.failure, plan, target)
    pins = (scratch / output).read_text().splitlines()
    return tuple(one for one in pins if (name_of(one), one.partition("==")[2]) not in target.has), ""


def _explained(failure: str, plan: EnvironmentPlan, target: Target) -> str:
    """Return why uv cannot tell. Raises ConfigError for what cannot be met, or is no requirement."""
    said = CREDENTIALS.sub("//", failure)
    lines = (*plan.lines, *plan.constraints)
    if bad := _BAD_LINE.match(said):
        line = next((one for one in lines if one in said), lines[int(bad[1] or 1) - 1])
        raise ConfigError(
            f"env.file: {plan.places.get(line, plan.name)}: {line!r} is not a requirement",
            _PLACE.sub("", said),
            "expected a name, optionally with a version (==1.2), or with @ and a URL",
        )
    told, _, hint = said.partition(" hint: ")
    unmet = _UNMET.match(told)
    if unmet is None:
        return said
    if "40" in hint and "credentials" in hint:
        raise ConfigError(f"{plan.name}: a package index wants other credentials", hint, "correct its URL")
    why = _STEP.sub("; ", unmet[1].removesuffix(_SO))
    named = {canonical(one) for one in re.findall(r"[A-Za-z0-9][\w.-]*\w|\w", why)}
    blamed = [one for one in lines if name_of(one) in named][:3]
    where = ", ".join(dict.fromkeys(plan.places.get(one, plan.name) for one in blamed)) or plan.name
    fault = "exclude each other" if len(blamed) > 1 else "cannot be met"
    advice = "correct the file, and repeat the command"
    for kept, _, version in (one.partition("==") for one in target.fixed):
        if canonical(kept) in named and plan.kind == "image":
            has = version.removesuffix(".*")
            fault = f"needs another {kept} than the image's {has}"
            advice = (
                f"require versions that work with {kept} {has}, or use a separate Python: -o env.kind=venv"
            )
    raise ConfigError(f"env.file: {where}: {' and '.join(blamed)} {fault}", why, advice)


def _torch_of(plan: EnvironmentPlan) -> tuple[str, ...]:
    """Return the torch and torchvision that a separate Python gets before all else."""
    return tuple(one for one in plan.torch if "==" in one)


def _releases(fixed: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return each package that is fixed, with every release that its pin admits."""
    pins = [one.partition("==") for one in fixed]
    numbers = [("", *map(str, range(_PATCHES))) if of.endswith("*") else ("",) for _, _, of in pins]
    return tuple(
        (name, f"{of.removesuffix('.*')}.{number}".removesuffix("."))
        for (name, _, of), several in zip(pins, numbers, strict=True)
        for number in several
    )


def _stub(folder: Path, name: str, version: str) -> None:
    """Write a wheel without content in place of a package that is there."""
    base = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as wheel:
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{base}.dist-info/METADATA", told)
        wheel.writestr(f"{base}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{base}.dist-info/RECORD", "")
