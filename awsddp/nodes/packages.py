"""Packages for nodes without internet: chosen and fetched here, for their Python, without what they have."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

from awsddp.answers import Platform
from awsddp.errors import NodeError
from awsddp.nodes.failures import tail
from awsddp.parallel import each
from awsddp.plan.environment import EnvironmentPlan, explain, image_constraints
from awsddp.plan.indexes import CREDENTIALS
from awsddp.plan.requirements import IMAGE_PACKAGES, canonical
from awsddp.report import Event, OnEvent
from awsddp.state import make_folder

_BUILDS = 20
"""How many packages without a wheel are built here before that is no longer tried."""
_NO_WHEEL = re.compile(r"No matching distribution found for ([^\s(;]+)")
_DIRECT = re.compile(r"(?:[\w.-]+\s*(\[[^]]*\])?\s*@\s*)?([a-z+]+://[^\s;]+)\s*(;.*)?")
"""A requirement that is a URL, with or without its name: extras, URL, marker."""
_NO_EXTRA = re.compile(r"(\S+) \S+ does not provide the extra ")
_ANY_VERSION = re.compile(r"([A-Za-z0-9][\w.-]*)\s*(\[[^]]*\])?\s*(>=?[^,;]*)?(;.*)?")
"""A requirement that the newest release meets."""
_NEWEST = re.compile(r"^\S+ \(([^()]+)\)$", re.MULTILINE)
_SILENT = "Retry(total=0"
"""What pip says before its last try to reach an index: another package would only wait as long."""
_ON_ITS_WAY = re.compile(
    r"\s*(?:Collecting|(Downloading|Using cached)) (?:\S*/)?([\w.-]+)\S*(?: \((\d[^)]*)\))?"
)
"""What pip says of a package that it chooses, and of a file that it fetches, with its size."""
_OLDEST_GLIBC = 5
_TIMEOUT_S = 1800
LINES = "requirements.txt"
"""What the nodes install, in the folder of the wheels: names and versions only."""
Release = tuple[str, str]
"""A package and its version."""
_KEPT = 4
"""How many sets of packages stay in the cache."""


def collect(plan: EnvironmentPlan, platform: Platform, *, folder: Path, on_event: OnEvent) -> Path:
    """Return a folder of wheels for the nodes; made once below `folder`, then kept.

    Raises NodeError for what cannot be had, by its name.
    """
    place = folder / f"{plan.stamp}-{platform.version}-{platform.machine}"
    if (place / LINES).exists():
        return place
    on_event(Event(f"fetching packages for {plan.name}", ""))
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheels = _Work(plan, platform, Path(scratch), on_event).fetch()
        shutil.rmtree(place, ignore_errors=True)
        wheels.rename(place)
    by_age = sorted((one for one in folder.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
    for old in by_age[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return place


class _Work:
    """One choice of packages in a scratch folder."""

    def __init__(self, plan: EnvironmentPlan, platform: Platform, scratch: Path, on_event: OnEvent) -> None:
        self.plan, self.scratch, self.on_event = plan, scratch, on_event
        self.wheels, self.built, self.image = (scratch / name for name in ("wheels", "built", "image"))
        self.built.mkdir()
        self.image.mkdir()
        self.python = plan.python or platform.version
        self.tags = wheel_tags(platform)
        self.has = platform.packages if plan.kind == "image" else {}
        python = "cp" + "".join(self.python.split(".")[:2])
        self.stubs = {
            canonical(name): stub_wheel(self.image, name, of, tag=f"{python}-{python}-{self.tags[0]}")
            for name, of in self.has.items()
        }
        self.lines, self.sent = list(plan.lines), list(plan.lines)
        self.every = True  # package of the image stays as it is, and not only what its torch is made of
        self.env = dict(
            os.environ,
            **plan.environ,
            **plan.indexes.environ,
            PIP_DISABLE_PIP_VERSION_CHECK="1",
            PIP_NO_INPUT="1",
            PIP_PROGRESS_BAR="off",
        )
        if plan.indexes.ca:
            (scratch / "ca.pem").write_text(plan.indexes.ca)
            self.env["PIP_CERT"] = str(scratch / "ca.pem")

    def fetch(self) -> Path:
        """Return the folder of wheels.

        The image's packages stay as they are; if that cannot be, its torch alone does.
        """
        for number, line in enumerate(self.plan.lines):
            if direct := _DIRECT.fullmatch(line):
                extras, url, marker = direct.groups(default="")
                wheel = self._fetch_url(url)
                name, version = wheel.name.split("-")[:2]
                self.lines[number] = f"{name}{extras} @ {wheel.as_uri()} {marker}"
                self.sent[number] = f"{name}{extras}=={version} {marker}"
        said = self._choose()
        if "ResolutionImpossible" in said:
            self.every = False
            said = self._choose()
        if said and "ResolutionImpossible" not in said:
            raise explain(said, name=self.plan.name)
        newest = self._newest()
        if said:
            for number, (_, line) in newest.items():
                self.lines[number] = line
            if self._choose():
                raise explain(said, name=self.plan.name)
        else:
            self._take(newest)
        has = {(canonical(name), version) for name, version in self.has.items()}
        for wheel in list(self.wheels.glob("*.whl")):
            if _release(wheel) in has:
                wheel.unlink()
        (self.wheels / LINES).write_text("".join(f"{one}\n" for one in self.sent))
        return self.wheels

    def _choose(self) -> str:
        """Download everything, and build what has no wheel; return "", or what pip said of its failure."""
        for _ in range(_BUILDS):
            said = self._download()
            missing = None if _SILENT in said else _NO_WHEEL.search(said)
            if missing is None or not self._build(missing[1]):
                break
        return said

    def _newest(self) -> dict[int, tuple[Release, str]]:
        """Return the newest releases of what is asked for without an upper limit, by the number of the line.

        Held to wheels, pip takes a release of years ago, without a word, where a newer one has none, or needs
        a package that has none.
        """
        self.on_event(Event(f"looking up the newest releases for {self.plan.name}", ""))
        asked = {number: _ANY_VERSION.fullmatch(line) for number, line in enumerate(self.plan.lines)}
        found = {number: one for number, one in asked.items() if one and canonical(one[1]) not in self.stubs}
        words = self._target()[2:]
        outputs = each(lambda one: self._pip("index", "versions", one[1], *words), found.values(), at_most=4)
        versions = [None if failure else _NEWEST.search(output) for failure, output in outputs]
        return {
            number: ((canonical(one[1]), version[1]), f"{one[1]}{one[2] or ''}=={version[1]}{one[4] or ''}")
            for (number, one), version in zip(found.items(), versions, strict=True)
            if version
        }

    def _take(self, newest: Mapping[int, tuple[Release, str]]) -> None:
        """Download the newest releases in place of older ones that were chosen, where that is possible."""
        chosen = set(map(_release, self.wheels.glob("*.whl")))
        said = ""
        for number, (release, line) in newest.items():
            if release not in chosen:
                before, self.lines[number] = self.lines[number], line
                if said := self._choose():  # something else that is asked for wants the older one
                    self.lines[number] = before
        if said:
            self._choose()

    def _download(self) -> str:
        """Fill `wheels` anew; return "", or what pip said of its failure."""
        shutil.rmtree(self.wheels, ignore_errors=True)
        lines = [*self.lines, *(one for one in self.plan.torch if "==" in one)]
        lines += ["uv"] if self.plan.kind == "venv" else []
        torch_index = [one for one in self.plan.torch if "==" not in one]
        pins = [*self.plan.constraints, *image_constraints(self.has, every=self.every)]
        (self.scratch / "requirements.txt").write_text("".join(f"{one}\n" for one in lines))
        (self.scratch / "constraints.txt").write_text("".join(f"{one}\n" for one in pins))
        words = [*self._target(), "--find-links", str(self.image), "--find-links", str(self.built)]
        words += ["--extra-index-url", torch_index[1]] if torch_index else []
        words += ["-r", str(self.scratch / "requirements.txt"), "-c", str(self.scratch / "constraints.txt")]
        failure, output = self._pip("download", "--dest", str(self.wheels), *words)
        return self._download() if self._replace_stubs(output) else failure

    def _replace_stubs(self, output: str) -> bool:
        """Have pip take real wheels for packages of the image whose extras it missed; return whether it must.

        They alone say what an extra needs. What torch is made of stays as it is.
        """
        wanted = {canonical(name) for name in _NO_EXTRA.findall(output)} & self.stubs.keys()
        wanted = {name for name in wanted if not IMAGE_PACKAGES.fullmatch(name)}
        for name in wanted:
            self.stubs.pop(name).unlink()
        return bool(wanted)

    def _target(self) -> list[str]:
        words = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", self.python]
        return words + [word for tag in self.tags for word in ("--platform", tag)]

    def _fetch_url(self, url: str) -> Path:
        """Return the wheel at a URL, or one of pure Python that is built from what is there."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        self.on_event(Event(f"fetching {CREDENTIALS.sub('//', url)}", ""))
        if url.partition("#")[0].endswith(".whl"):
            said, _ = self._pip("download", "--no-deps", "--dest", str(folder), *self._target(), url)
        else:
            said = self._build_into(folder, url)
        if said:
            raise explain(said, name=self.plan.name)
        return next(folder.glob("*.whl"))

    def _build(self, requirement: str) -> bool:
        """Build a package that has no wheel; whether it is now there, as one of pure Python."""
        self.on_event(Event(f"building {requirement}, which has no wheel", ""))
        said = self._build_into(self.built, requirement)
        if said and not _NO_WHEEL.search(said):
            raise NodeError(
                f"{requirement} has no wheel, and could not be built here",
                tail(said),
                "choose a version with a wheel, or put one into a folder: --find-links FOLDER in the file",
            )
        return not said

    def _build_into(self, folder: Path, requirement: str) -> str:
        """Build a wheel of pure Python; return "", or what pip said. Raises NodeError for another one."""
        before = set(folder.iterdir())
        said, _ = self._pip("wheel", "--no-deps", "--wheel-dir", str(folder), requirement)
        for wheel in set(folder.iterdir()) - before:
            if not wheel.name.endswith("-none-any.whl"):
                named = CREDENTIALS.sub("//", requirement)
                raise NodeError(
                    f"{named} has no wheel for the nodes, and is not pure Python",
                    f"built here it is {wheel.name}, which only fits machines like this one",
                    "choose a version with a wheel, or build one on a node, for --find-links FOLDER",
                )
        return said

    def _pip(self, verb: str, *words: str) -> tuple[str, str]:
        """Run pip; return its output if it failed, else "", and its output in any case.

        Raises NodeError where it does not end.
        """
        said = ""
        with subprocess.Popen(
            [sys.executable, "-m", "pip", verb, "--retries", "2", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.env,
            errors="replace",
        ) as process:
            limit = threading.Timer(_TIMEOUT_S, process.kill)
            limit.start()
            try:
                for line in process.stdout or ():
                    said += line
                    if what := on_its_way(line):
                        self.on_event(Event(f"fetching packages for {self.plan.name}: {what}", ""))
                process.wait()
            finally:
                limit.cancel()
                process.kill()
        if process.returncode == -signal.SIGKILL:
            raise NodeError(
                f"{self.plan.name}: pip {verb} did not end within {_TIMEOUT_S / 60:.0f} minutes",
                tail(said),
                "check env.index_url and env.proxy, and repeat the command",
            )
        return said or "pip failed" if process.returncode else "", said


def on_its_way(line: str) -> str:
    """Return which package pip says that it chooses, or which file and of what size it fetches; else ""."""
    found = _ON_ITS_WAY.match(line)
    if found is None or ".metadata" in line:
        return ""
    is_file, name, size = found.groups(default="")
    return f"{' '.join(name.split('-')[:2])} ({size})" if is_file else name


def wheel_tags(platform: Platform) -> tuple[str, ...]:
    """Return the platforms of wheels that a node runs, the best first (PEP 600)."""
    minor = int((platform.libc or "2.28").split(".")[1])
    newer = [f"manylinux_2_{number}_{platform.machine}" for number in range(minor, _OLDEST_GLIBC - 1, -1)]
    older = [f"manylinux{year}_{platform.machine}" for year in ("2014", "2010", "1")]
    return (*newer, *older, f"linux_{platform.machine}")


def _release(wheel: Path) -> Release:
    """Return the package and the version of a wheel, by its file name."""
    name, version = wheel.name.split("-")[:2]
    return canonical(name), version


def stub_wheel(folder: Path, name: str, version: str, *, tag: str) -> Path:
    """Write a wheel without content in place of a package that the image has, and return it.

    Its tag is the best there can be and its build number high, so that pip takes it before the real one.
    """
    base = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    path = folder / f"{base}-9999-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = f"{base}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nBuild: 9999\nTag: {tag}\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path
