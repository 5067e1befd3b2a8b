"""Chooses the packages of a project, here and by uv: what cannot be met is refused before it costs."""

import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from awsddp.answers import Platform
from awsddp.compat.releases import RELEASES, release
from awsddp.errors import ConfigError
from awsddp.plan.environment import EnvironmentPlan
from awsddp.plan.indexes import CREDENTIALS, indexes_here, is_folder_here
from awsddp.plan.requirements import IMAGE_PACKAGES, canonical, name_of
from awsddp.plan.uv import run_uv

_GLIBC = (*range(40, 30, -1), 28, 17)
"""The minor releases that uv has a platform for (https://docs.astral.sh/uv/reference/cli/#uv-pip-compile)."""
_PATCHES = 10
_TIMEOUT_S = 300.0
_UNMET = re.compile(
    r"(?:error:|\s*\u00d7) No solution found when resolving dependencies(.*?)(?=\n\s*hint:|\Z)", re.DOTALL
)
_BAD_LINE = re.compile(r"(asked|fixed)\.txt` at position (\d+)|(asked|fixed)\.txt:(\d+):\d+")
_PIN = re.compile(r"([\w.-]+)(?:\[[^]]*\])?==(\S+)")
_DENIED = re.compile(r"hint: (An index URL[^\n]*\n?[^\n]*\(40[13][^)]*\))")
_FRAME = re.compile("[\u2500-\u25ff\u00d7]|cause:")
_STEP = re.compile(r", we can conclude that .*? (?:cannot be used|are incompatible)\. (?:And )?")
_SO = ", we can conclude that your requirements are unsatisfiable."
_NO_EXTRA = re.compile(r"The package `([^`=]+)==\S+ does not have an extra named")
_BUILT = re.compile("no usable wheels|building from source is disabled|Building source distributions")
_KEPT = 50
"""How many choices are kept."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What packages must fit: a Python, a machine, and the packages that it `has`, each with its versions.

    An exact one is a node that was asked: there a package may be built, and the versions are those that are
    chosen, where that is possible.
    """

    python: str
    machine: str = "x86_64"
    glibc: int = 40
    has: Mapping[str, Sequence[str]] = field(default_factory=dict)
    exact: bool = False


def target_of(plan: EnvironmentPlan, platform: Platform) -> Target:
    """Return what the packages of a plan must fit on a node that was asked."""
    has = {canonical(name): [version] for name, version in platform.packages.items()}
    return Target(
        python=plan.python or platform.version,
        machine=platform.machine,
        glibc=int((platform.libc or "2.28").split(".")[1]),
        has=has if plan.kind == "image" else _torch_of(plan),
        exact=plan.kind != "conda",
    )


def check(plan: EnvironmentPlan, *, image_torch: str | None, machine: str, cache: Path) -> str:
    """Refuse packages that no node could get, as far as that is known before a launch.

    Returns "", or why uv could not tell: nothing is refused then. A package that would have to be built, and
    what a URL names, is left to the nodes. The Python of an image is not known: one of its torch's must do.
    Raises ConfigError.
    """
    row = release(image_torch) if image_torch else None
    pythons = row.pythons if row else RELEASES[0].pythons
    has = _torch_of(plan)
    if row and plan.kind == "image":
        has = {
            "torch": _patches(row.torch),
            "torchaudio": _patches(row.torch),
            "torchvision": _patches(row.torchvision),
        }
    lines = tuple(one for one in plan.lines if "://" not in one)
    refused: ConfigError | None = None
    for python in [plan.python] if plan.python else [pythons[-1], pythons[0]]:
        try:
            return choose(
                replace(plan, lines=lines), Target(python=python, machine=machine, has=has), cache=cache
            )[1]
        except ConfigError as error:
            refused = refused or error
    raise refused or AssertionError


def choose(plan: EnvironmentPlan, target: Target, *, cache: Path) -> tuple[tuple[str, ...] | None, str]:
    """Return the versions that meet a plan's lines, without what the target has, and "".

    They are chosen once and kept below `cache`: nodes that come later get the same. None, and why, where uv
    cannot tell: no index answers, or a package cannot be built here. Raises ConfigError for what cannot be
    met.
    """
    key = hashlib.sha256(json.dumps([plan.stamp, plan.lines, repr(target)]).encode()).hexdigest()[:16]
    kept = cache / f"{key}.txt"
    if not plan.lines:
        return (), ""
    if kept.exists():
        return tuple(kept.read_text().splitlines()), ""
    with tempfile.TemporaryDirectory() as scratch:
        found, why = _chosen(plan, target, Path(scratch))
    text = "".join(f"{one}\n" for one in found or ())
    if found is not None and not CREDENTIALS.search(text):
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept.write_text(text)
        for old in sorted(cache.glob("*.txt"), key=lambda one: one.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
    return found, why


def _chosen(plan: EnvironmentPlan, target: Target, scratch: Path) -> tuple[tuple[str, ...] | None, str]:
    indexes, has = plan.indexes.otherwise(indexes_here()), scratch / "has"
    folders = [str(Path(one).absolute()) if is_folder_here(one) else one for one in indexes.find_links]
    env = {**plan.environ, **replace(indexes, find_links=(str(has), *folders)).environ}
    if indexes.ca:
        (scratch / "ca.pem").write_text(indexes.ca)
        env["SSL_CERT_FILE"] = str(scratch / "ca.pem")
    has.mkdir()
    stubs = {name: [_stub(has, name, one) for one in versions] for name, versions in target.has.items()}
    asked = [_without_build(one, target) for one in plan.lines]
    fixed = [
        *plan.constraints,
        *(_pin(name, target) for name in target.has if IMAGE_PACKAGES.fullmatch(name)),
    ]
    preferred = [_pin(name, target) for name in target.has if target.exact and plan.kind == "image"]
    for name, lines in (("asked", asked), ("fixed", fixed), ("chosen", preferred)):
        (scratch / f"{name}.txt").write_text("".join(f"{one}\n" for one in lines))
    glibc = next((one for one in _GLIBC if one <= target.glibc), _GLIBC[-1])
    words = [
        "pip",
        "compile",
        f"{scratch}/asked.txt",
        "-c",
        f"{scratch}/fixed.txt",
        "-o",
        f"{scratch}/chosen.txt",
    ]
    words += ["--no-header", "--no-annotate", "--no-strip-extras", "--python-version", target.python]
    words += ["--python-platform", f"{target.machine}-manylinux_2_{glibc}"]
    words += ["--no-index"] * indexes.no_index + ["--no-build"] * (not target.exact)
    if "torch" not in target.has and not target.exact:  # any does
        _stub(has, "torch", "9999")
        (scratch / "torch.txt").write_text("torch==9999\n")
        words += ["--overrides", f"{scratch}/torch.txt"]
    while True:
        said = run_uv(words, env, timeout_s=_TIMEOUT_S)
        lacking = {canonical(name) for name in _NO_EXTRA.findall(said.told)} & stubs.keys()
        lacking = {name for name in lacking if not IMAGE_PACKAGES.fullmatch(name)}
        if not lacking:
            break
        for stub in [stub for name in lacking for stub in stubs.pop(name)]:
            stub.unlink()  # the package's own wheel says what its extras need
    if said.failure:
        only_nodes = not target.exact and bool(
            _BUILT.search(said.failure) or (indexes.no_index and "provided package locations" in said.failure)
        )
        return None, "" if only_nodes else _explained(said.failure, plan, target, asked=asked, fixed=fixed)
    pins = [(one, _PIN.fullmatch(one)) for one in (scratch / "chosen.txt").read_text().splitlines()]
    return tuple(
        one for one, pin in pins if not pin or pin[2] not in target.has.get(canonical(pin[1]), ())
    ), ""


def _explained(failure: str, plan: EnvironmentPlan, target: Target, **lines: list[str]) -> str:
    """Return why uv cannot tell. Raises ConfigError for what cannot be met, or is no requirement."""
    if bad := _BAD_LINE.search(failure):
        of = lines[bad[1] or bad[3]]
        cause = failure.partition("cause:")[2].partition("\n")[0]
        before = "".join(f"{one}\n" for one in of).encode()[: int(bad[2] or 0)]
        line = of[before.count(b"\n") if bad[2] else int(bad[4]) - 1]
        raise ConfigError(
            f"env.file: {plan.places.get(line, plan.name)}: {line!r} is not a requirement",
            (cause or failure.partition(": ")[2].rpartition(": ")[0]).strip(),
            "expected a name, optionally with a version (==1.2), or with @ and a URL",
        )
    unmet = _UNMET.match(failure)
    if unmet is None:
        said = [one.partition(": ")[2] or one for one in failure.strip().splitlines()]
        return CREDENTIALS.sub("//", ": ".join(dict.fromkeys((said[0], said[-1]))))
    if denied := _DENIED.search(failure):
        why = CREDENTIALS.sub("//", " ".join(denied[1].split()))
        raise ConfigError(f"{plan.name}: a package index wants other credentials", why, "correct its URL")
    words = " ".join(re.sub(_FRAME, " ", unmet[1]).split())
    why = _STEP.sub("; ", words.removeprefix("Because ").removesuffix(_SO))
    named = {canonical(one) for one in re.findall(r"[A-Za-z0-9][\w.-]*\w|\w", why)}
    kept = [one for one in target.has if one in named and IMAGE_PACKAGES.fullmatch(one)]
    if kept and plan.kind == "image":
        name, _, has = _pin(kept[0], target).removesuffix(".*").partition("==")
        raise ConfigError(
            f"{plan.name} needs another {name} than the image's {has}",
            why,
            f"require versions that work with {name} {has}, or use a separate Python: -o env.kind=venv",
        )
    blamed = [one for one in (*plan.lines, *plan.constraints) if name_of(one) in named][:3]
    where = ", ".join(dict.fromkeys(plan.places.get(one, plan.name) for one in blamed)) or plan.name
    fault = "exclude each other" if len(blamed) > 1 else "cannot be met"
    advice = "correct the file, and repeat the command"
    raise ConfigError(f"env.file: {where}: {' and '.join(blamed)} {fault}", why, advice)


def _torch_of(plan: EnvironmentPlan) -> dict[str, list[str]]:
    """Return the torch and torchvision that a separate Python gets before all else."""
    pins = [one.partition("==") for one in plan.torch if "==" in one]
    return {name: _patches(of.removesuffix(".*")) if of.endswith(".*") else [of] for name, _, of in pins}


def _patches(release: str) -> list[str]:
    return [f"{release}.{number}" for number in range(_PATCHES)]


def _pin(name: str, target: Target) -> str:
    one, *others = target.has[name]
    return f"{name}=={one.rpartition('.')[0]}.*" if others else f"{name}=={one}"


def _without_build(line: str, target: Target) -> str:
    """Return a line for a package that stays without the build of it that the line names, as +cu130."""
    name = name_of(line)
    return re.sub(r"\+[\w.]+", "", line) if name in target.has and IMAGE_PACKAGES.fullmatch(name) else line


def _stub(folder: Path, name: str, version: str) -> Path:
    """Write a wheel without content in place of a package that is there, and return it."""
    base = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        wheel.writestr(f"{base}.dist-info/METADATA", told)
        wheel.writestr(f"{base}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{base}.dist-info/RECORD", "")
    return path
