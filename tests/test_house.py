"""The house itself: who may import whom, and that the wheel carries everything."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "awsddp"

_BASE = {"errors", "harmless", "limits"}
_RECORDS = {"answers", "values", "spec", "config", "records", "resources"} | _BASE
_PURE = {"plan", "report", "compat", "billing", "parallel", "page", "returns"} | _RECORDS
_MIDDLE = _PURE | {"state"}
_STORY = {
    *(
        "advice",
        "data",
        "doctor",
        "down",
        "fetch",
        "follow",
        "job",
        "keywords",
        "known",
        "mentions",
        "reach",
        "reconcile",
        "rehearsal",
    ),
    *("release", "results", "saved", "saving", "search", "starter", "status", "train", "unsent", "up"),
    "whole_run",
}
"""What the methods of a cluster and its jobs do. Whoever uses whom there, no circle: see below."""
LADDER = {
    "errors": _BASE,
    "harmless": _BASE,
    "limits": _BASE,
    "values": _BASE,
    "spec": {"records", "values"} | _BASE,
    "config": _RECORDS,
    "answers": _RECORDS,
    "records": _RECORDS,
    "resources": _RECORDS,
    "compat": _PURE,
    "plan": _PURE,
    "report": _PURE,
    "page": _PURE,
    "billing": _PURE,
    "returns": _PURE,
    "keywords": _BASE,
    "parallel": _BASE,
    "state": _PURE,
    "aws": _MIDDLE | {"aws"},
    "nodes": _MIDDLE | {"nodes"},
    "jobs": _MIDDLE | {"jobs"},
    "local": _MIDDLE | {"local"},
    "cli": _MIDDLE | {"cli", "cluster", "jobs", "local"} | _STORY,
    **dict.fromkeys(_STORY, _MIDDLE | {"aws", "cluster", "jobs", "local", "nodes"} | _STORY),
    "cluster": _MIDDLE | {"aws", "keywords", "nodes"} | _STORY,
    "job": _MIDDLE | {"cluster", "jobs"} | _STORY,
}
OWNERS = {
    "boto3": {"aws"},
    "botocore": {"aws", "jobs", "local"},  # nodes copy objects; the local endpoint checks signatures
    "paramiko": {"nodes"},
    "fabric": {"nodes"},
    "moto": {"local"},
    "werkzeug": {"local"},
    "click": {"cli"},
    "rich": {"cli"},
    "torch": set(),
}


def imports(file: Path) -> set[str]:
    """Return every module that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {f"{node.module}.{name.name}" for name in node.names} | {str(node.module)}
    return found


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_imports_go_down_the_ladder_only(file: Path) -> None:
    room = room_of(file)
    if room in ("__init__", "__main__"):
        return
    allowed = LADDER[room]
    for name in imports(file):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "awsddp" and target and target != "__version__":
            assert target in allowed, f"{room} imports awsddp.{target}"
            inside = rest.startswith("local.") and rest.split(".")[1] != "client"
            assert room == "local" or not inside, f"{room} imports {name}, not awsddp.local.client"
        if top in OWNERS:
            assert room in OWNERS[top], f"{room} imports {top}"


def uses(file: Path) -> set[Path]:
    """Return the files of awsddp that a file needs when it runs, at once or later."""
    tree = ast.parse(file.read_text())
    types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[Path] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in types_only:
            module = ROOT.joinpath(*str(node.module).split("."))
            inside = [module / f"{name.name}.py" for name in node.names]
            found |= {path for path in (*inside, module.with_suffix(".py")) if path.is_file()}
    return found - {file}


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {file: uses(file) for file in PACKAGE.rglob("*.py")}
    while free := [file for file, needs in left.items() if not needs & left.keys()]:
        for file in free:
            del left[file]
    names = sorted(str(file.relative_to(ROOT)) for file in left)
    assert not left, f"one of these files needs itself: {names}"


def test_training_programs_do_not_know_awsddp() -> None:
    for file in (ROOT / "train").rglob("*.py"):
        assert not any(name.split(".")[0] == "awsddp" for name in imports(file)), file


@pytest.mark.prove
def test_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("awsddp-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for carried in ("awsddp/_train/main.py", "awsddp/_train/digits.csv.gz", "awsddp/_templates/ssh_config"):
        assert carried in names
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", empty], check=True)
    (site,) = (empty / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    needs = {path.parent for path in map(Path, sys.path) if path.name == "site-packages"}
    assert needs
    own = next(path for path in sys.path if path.endswith("site-packages"))
    for package in ("click", "msgspec"):
        (site / package).symlink_to(Path(own) / package)
    program = (
        "import sys; from awsddp.util.shipped_files import shipped_folder, template; "
        "assert (shipped_folder('train') / 'main.py').is_file() and template('ssh_config'); "
        "from awsddp.cli.main import main; sys.argv = ['awsddp', '--help']; main()"
    )
    shown = subprocess.run(
        [empty / "bin" / "python", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "train" in shown.stdout


def test_help_needs_neither_aws_nor_ssh_nor_torch() -> None:
    program = (
        "import sys\nfrom awsddp.cli.main import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'boto3', 'botocore', 'paramiko', 'rich', 'moto', 'torch', 'msgspec'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
