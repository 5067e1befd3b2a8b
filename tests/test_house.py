"""The package as a whole: which room may import which, and what the wheel contains."""

import ast
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "awsddp"
FLOORS = (
    ("cli",),
    ("api",),
    ("cluster",),
    ("job",),
    ("storage",),
    ("session",),
    ("aws", "nodes", "agent_client", "local"),
    ("plan", "state"),
    ("agent",),
    ("settings",),
    ("model",),
    ("util",),
    ("compat",),
    ("errors",),
)
"""The rooms, from the roof down. A file imports from its own room and from the floors below it."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OWNERS = {
    "boto3": {"aws"},
    "botocore": {"aws", "agent", "local"},  # nodes copy objects; the local endpoint checks signatures
    "paramiko": {"nodes"},
    "fabric": {"nodes"},
    "moto": {"local"},
    "werkzeug": {"local"},
    "click": {"cli"},
    "rich": {"cli"},
    "torch": set(),
}
"""The rooms that may import a third-party package."""


def find_imports(file: Path) -> set[str]:
    """Return every module that a file imports: at its top, inside a function, or for types alone."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            inside = {f"{node.module}.{name.name}" for name in node.names}
            modules = {name for name in inside if _find_file(name) is not None}
            imported |= modules | ({str(node.module)} if len(modules) < len(inside) else set())
    return imported


def _find_file(module: str) -> Path | None:
    """Return the file of a module of this repository, None where there is none."""
    path = ROOT.joinpath(*module.split("."))
    candidates = (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())
    return next(candidates, None)


def find_room(file: Path) -> str:
    """Return the room of a file of awsddp: the folder, or the file at the root."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def find_import_cycles(files: set[Path]) -> list[str]:
    """Return the files that import themselves through others."""
    needs = {file: {_find_file(name) for name in find_imports(file)} & files - {file} for file in files}
    while free := [file for file, needed in needs.items() if not needed & needs.keys()]:
        for file in free:
            del needs[file]
    return sorted(str(file.relative_to(ROOT)) for file in needs)


ALL = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", ALL, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_from_its_room_and_the_floors_below(file: Path) -> None:
    room = find_room(file)
    for name in find_imports(file):
        top, _, inner = name.partition(".")
        target = inner.partition(".")[0]
        if top in OWNERS:
            assert room in OWNERS[top], f"{room} imports {top}"
        if top != "awsddp" or room in ("__init__", "__main__", target):
            continue
        assert target, f"{room} imports awsddp itself: import what it means"
        assert FLOOR[target] > FLOOR[room], f"{room} imports {name}, which is no floor below it"
        assert target != "local" or name == "awsddp.local.client", (
            f"{room} imports {name}: the door is its client"
        )


def test_there_are_no_import_cycles() -> None:
    assert find_import_cycles(set(ALL)) == []
    assert find_import_cycles(set((ROOT / "train").rglob("*.py"))) == []


def test_the_agent_imports_only_itself_and_the_model() -> None:
    """The model has the types of its answers, and is not on a node."""
    for file in (PACKAGE / "agent").rglob("*.py"):
        rooms = {name.split(".")[1] for name in find_imports(file) if name.startswith("awsddp.")}
        assert rooms <= {"agent", "model"}, f"{file.name} imports of {rooms}"


def test_the_agent_client_imports_only_messages_log_stream_and_diagnosis_of_the_agent() -> None:
    pure = {"awsddp.agent", "awsddp.agent.messages", "awsddp.agent.log_stream"}
    for file in (PACKAGE / "agent_client").rglob("*.py"):
        taken = {name for name in find_imports(file) if name.startswith("awsddp.agent.")}
        assert all(name in pure or name.startswith("awsddp.agent.diagnosis.") for name in taken), file.name


def test_the_root_of_the_package_has_rooms_and_at_most_6_files() -> None:
    files = sorted(path.name for path in PACKAGE.glob("*") if path.is_file())
    assert len(files) <= 6, files
    assert {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    } <= FLOOR.keys()


def test_no_module_name_is_used_in_three_rooms() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for file in ALL:
        if file.name not in ("__init__.py", "__main__.py"):
            rooms[file.stem].add(str(file.parent.relative_to(PACKAGE)))
    assert {name: sorted(folders) for name, folders in rooms.items() if len(folders) > 2} == {}


def test_training_programs_do_not_import_awsddp() -> None:
    for file in (ROOT / "train").rglob("*.py"):
        assert not any(name.split(".")[0] == "awsddp" for name in find_imports(file)), file


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
    site_packages = next(path for path in sys.path if path.endswith("site-packages"))
    for package in ("click", "msgspec"):
        (site / package).symlink_to(Path(site_packages) / package)
    program = (
        "import sys; from awsddp.util.shipped_files import shipped_folder, template; "
        "assert (shipped_folder('train') / 'main.py').is_file() and template('ssh_config'); "
        "from awsddp.cli.main import main; sys.argv = ['awsddp', '--help']; main()"
    )
    process = subprocess.run(
        [empty / "bin" / "python", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "train" in process.stdout


def test_help_needs_neither_aws_nor_ssh_nor_torch() -> None:
    program = (
        "import sys\nfrom awsddp.cli.main import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'boto3', 'botocore', 'paramiko', 'rich', 'moto', 'torch', 'msgspec'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
