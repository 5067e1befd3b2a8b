import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.model.documents import NodeFiles
from awsddp.model.events import Event
from awsddp.nodes import rsync, sync
from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.login import Endpoint, Login, ssh_config
from awsddp.nodes.project_files import list_files_to_send
from awsddp.util.parallel import NodesFailed
from tests.support.project_folder import ODD_NAMES, write_files
from tests.support.ssh_hosts import Host, Lab, wait_until

MakeLab = Callable[[int], Lab]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project folder, whose name needs quoting."""
    folder = tmp_path / "my project's $HOME"
    folder.mkdir()
    return folder


@pytest.fixture(params=["at once", "by rsync"])
def both_transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small changes go over the open SSH connection, large ones by rsync, with the same result."""
    if request.param == "by rsync":
        monkeypatch.setattr(sync, "AT_ONCE_BYTES", -1)


@pytest.fixture
def by_rsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "AT_ONCE_BYTES", -1)


def push(lab: Lab, project: Path, *ignore: str, **settings: object) -> dict[int, NodeFiles]:
    with lab.fleet() as fleet:
        listing = list_files_to_send(project, ignore)
        return sync.push(listing, fleet, **settings)  # type: ignore[arg-type]


def make_login(folder: Path) -> Login:
    return Login(key=folder / "key", known_hosts=folder / "known_hosts", ssh_config=folder / "config")


def read_tree(root: Path) -> dict[str, object]:
    """Return what a folder holds: file contents, link targets, None for folders."""
    entries: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            entries[name] = ("link", str(path.readlink()))
        else:
            entries[name] = path.read_bytes() if path.is_file() else None
    return entries


@pytest.mark.usefixtures("both_transports")
def test_work_folder_of_each_node_equals_the_project(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(2)
    write_files(project, "a.py", "pkg/b.py")
    (project / "empty").mkdir()
    (project / "link").symlink_to("pkg/b.py")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o750)
    events: list[Event] = []
    counts = push(lab, project, on_event=events.append)
    for host in lab.hosts:
        assert read_tree(host.work) == read_tree(project)
        assert (host.work / "run.sh").stat().st_mode & 0o777 == 0o750
        assert (host.work / "a.py").stat().st_mtime_ns == (project / "a.py").stat().st_mtime_ns
    size = sum(path.lstat().st_size for path in project.rglob("*") if not path.is_dir() or path.is_symlink())
    assert counts == {0: NodeFiles(node=0, files=5, bytes=size), 1: NodeFiles(node=1, files=5, bytes=size)}
    assert {event.who for event in events} == {"node0", "node1"}
    assert events[-1].fraction == 1.0


@pytest.mark.usefixtures("both_transports")
def test_second_sync_sends_only_what_changed(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "a", "b", "c", "d")
    (project / "link").symlink_to("a")
    push(lab, project)
    assert push(lab, project) == {0: NodeFiles(node=0, files=0, bytes=0)}
    before = (project / "b").stat()
    (project / "b").write_bytes(b"X" * before.st_size)
    os.utime(project / "b", ns=(before.st_mtime_ns, before.st_mtime_ns + 1))  # the same second, the same size
    (project / "c").chmod(0o700)
    (lab.hosts[0].work / "d").unlink()
    (project / "link").unlink()
    (project / "link").symlink_to("b")
    assert push(lab, project)[0].files == 4
    assert read_tree(lab.hosts[0].work) == read_tree(project)
    assert push(lab, project)[0].files == 0


def test_large_sync_reports_its_size_and_largest_folder(
    make_lab: MakeLab, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awsddp.nodes.sync.LARGE_BYTES", 1e6)
    lab, events = make_lab(1), list[Event]()
    write_files(project, "a.py", "data/b")
    (project / "data" / "b").write_bytes(bytes(2_000_000))
    for _ in range(2):
        push(lab, project, on_event=events.append)
    assert [event.text for event in events if event.who is None] == [
        "2.0 MB go to each node; the largest: data/ 2.0 MB"
    ]


def test_only_a_node_that_differs_gets_files(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(2)
    write_files(project, "a", "b")
    push(lab, project)
    (lab.hosts[1].work / "a").write_text("spoiled")
    assert push(lab, project) == {
        0: NodeFiles(node=0, files=0, bytes=0),
        1: NodeFiles(node=1, files=1, bytes=2),
    }


def test_files_created_on_a_node_stay(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "train.py", "pkg/old.py")
    push(lab, project)
    work = lab.hosts[0].work
    write_files(work, "saved_models/x.pth", "data/stl10.bin", "pkg/made_here.txt")
    (project / "pkg/old.py").unlink()
    (project / "pkg").rmdir()
    write_files(project, "new.py")
    push(lab, project)
    assert set(read_tree(work)) == {
        *("train.py", "new.py", "pkg", "pkg/made_here.txt"),
        *("saved_models", "saved_models/x.pth", "data", "data/stl10.bin"),
    }


@pytest.mark.usefixtures("both_transports")
def test_removed_files_are_removed_on_the_node_with_folders_that_become_empty(
    make_lab: MakeLab, project: Path
) -> None:
    lab = make_lab(1)
    write_files(project, "a", "old/deep/b", "old/deep/c", "kept/d")
    (project / "empty").mkdir()
    (project / "link").symlink_to("a")
    push(lab, project)
    for path in ("old/deep/b", "old/deep/c", "kept/d", "link"):
        (project / path).unlink()
    for path in ("old/deep", "old", "empty"):
        (project / path).rmdir()
    push(lab, project)
    assert set(read_tree(lab.hosts[0].work)) == {"a", "kept"}


def test_removed_file_stays_on_a_node_that_changed_it(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "metrics.json", "a")
    push(lab, project)
    (lab.hosts[0].work / "metrics.json").write_text("made on the node")
    (project / "metrics.json").unlink()
    push(lab, project)
    push(lab, project)
    assert (lab.hosts[0].work / "metrics.json").read_text() == "made on the node"


def test_newly_ignored_file_stays_on_the_node_until_it_is_removed(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "data/set.bin", "a")
    push(lab, project)
    push(lab, project, "data/")
    assert (lab.hosts[0].work / "data/set.bin").exists()
    (project / "data/set.bin").unlink()
    (project / "data").rmdir()
    push(lab, project)
    assert set(read_tree(lab.hosts[0].work)) == {"a"}


@pytest.mark.usefixtures("both_transports")
def test_files_folders_and_links_may_replace_each_other(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "one", "two/x", "three/y", "four")
    push(lab, project)
    (project / "one").unlink()
    write_files(project, "one/inside")
    (project / "two/x").unlink()
    (project / "two").rmdir()
    write_files(project, "two")
    (project / "three").rename(project / "five")
    (project / "three").symlink_to("five")
    (project / "four").unlink()
    (project / "four").symlink_to("two")
    push(lab, project)
    assert read_tree(lab.hosts[0].work) == read_tree(project)


@pytest.mark.usefixtures("both_transports")
def test_file_with_any_name_is_synced(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, *ODD_NAMES, *(f"dir {name}/{name}" for name in ODD_NAMES))
    push(lab, project)
    assert read_tree(lab.hosts[0].work) == read_tree(project)
    assert push(lab, project)[0].files == 0
    for name in ODD_NAMES:
        (project / name).unlink()
    push(lab, project)
    assert read_tree(lab.hosts[0].work) == read_tree(project)
    assert not list(lab.folder.rglob("canary"))


def test_another_folder_is_synced_separately(make_lab: MakeLab, project: Path, tmp_path: Path) -> None:
    lab = make_lab(1)
    write_files(project, "a")
    other = tmp_path / "train"
    write_files(other, "main.py")
    push(lab, project)
    push(lab, other, folder="train")
    push(lab, project)
    assert set(read_tree(lab.hosts[0].home)) == {
        *("awsddp", "awsddp/train.sent", "awsddp/.train.versions", "awsddp/train", "awsddp/train/main.py"),
        *("awsddp/work.sent", "awsddp/.work.versions", "awsddp/work", "awsddp/work/a"),
    }


@pytest.mark.usefixtures("both_transports")
def test_node_cannot_request_unlisted_files(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "a", ".git/secret")
    (project.parent / "key").write_text("private")
    answer = r"changed a\0changed .git/secret\0unsure 0 ../key\0changed /etc/passwd\0missing ../key\0"
    lab.hosts[0].script("python3", f"#!/bin/sh\ncat >> '{{root}}/received'\nprintf '\\0{answer}'\n")
    (lab.hosts[0].work).mkdir(parents=True)
    assert push(lab, project)[0].files == 1
    received = (lab.hosts[0].root / "received").read_bytes()
    assert (b" a" in received, b"private" in received, b"secret" in received) == (True, False, False)
    assert set(read_tree(lab.hosts[0].work)) <= {"a"}
    assert (project.parent / "key").exists()


@pytest.mark.usefixtures("both_transports")
def test_output_of_a_login_shell_is_ignored(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    enter = lab.hosts[0].root / "enter"
    enter.write_text(
        enter.read_text().replace("exec ", 'case "$SSH_ORIGINAL_COMMAND" in p*) echo hi;; esac\nexec ')
    )
    write_files(project, "a")
    assert push(lab, project)[0].files == 1


def test_sparse_file_stays_sparse(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    with (project / "holes").open("wb") as stream:
        stream.truncate(20_000_000)
        stream.seek(10_000_000)
        stream.write(b"data")
    assert push(lab, project) == {0: NodeFiles(node=0, files=1, bytes=20_000_000)}
    copy = lab.hosts[0].work / "holes"
    assert copy.read_bytes() == (project / "holes").read_bytes()
    assert copy.stat().st_blocks * 512 < 1_000_000


@pytest.mark.usefixtures("both_transports")
def test_file_removed_during_a_sync_is_no_error(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(project, "a", "b")
    with lab.fleet() as fleet:
        listing = list_files_to_send(project)
        (project / "b").unlink()
        sync.push(listing, fleet)
    assert set(read_tree(lab.hosts[0].work)) == {"a"}


def test_small_sync_needs_no_rsync(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(2)
    write_files(project, "a", "pkg/b")
    for host in lab.hosts:
        replace_rsync(host, "exit 1")
    assert {node: count.files for node, count in push(lab, project).items()} == {0: 2, 1: 2}
    assert [read_tree(host.work) for host in lab.hosts] == [read_tree(project)] * 2
    assert {path.name for path in (lab.hosts[0].home / "awsddp").iterdir()} == {
        *("work", "work.sent", ".work.versions"),
    }


def test_failed_sync_leaves_no_temporary_files(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(lab.hosts[0].work, "out/made_here")
    write_files(project, "out")
    with pytest.raises(NodesFailed, match="out"):
        push(lab, project)
    assert {path.name for path in (lab.hosts[0].home / "awsddp").iterdir()} == {"work", "work.sent"}


def replace_rsync(host: Host, command: str) -> None:
    host.script("rsync", f"#!/bin/sh\n{command}\n")


@pytest.mark.usefixtures("by_rsync")
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo 'rsync: command not found' >&2; exit 127", "rsync is not installed"),
        ("echo 'rsync: write failed: No space left on device (28)' >&2; exit 11", "a disk is full"),
        ("kill -9 $PPID", "the transfer was interrupted"),
        ("echo oops >&2; exit 2", "exit"),
    ],
)
def test_failed_transfer_is_reported_with_the_reason_and_the_others_complete(
    make_lab: MakeLab, project: Path, command: str, reason: str
) -> None:
    lab = make_lab(2)
    replace_rsync(lab.hosts[1], command)
    write_files(project, "a")
    with pytest.raises(NodesFailed, match=reason) as error:
        push(lab, project)
    assert list(error.value.failures) == [1]
    assert read_tree(lab.hosts[0].work) == read_tree(project)


@pytest.mark.usefixtures("both_transports")
def test_folder_on_the_node_that_blocks_a_file_is_named(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    write_files(lab.hosts[0].work, "out/made_here")
    write_files(project, "out")
    with pytest.raises(NodesFailed, match="out"):
        push(lab, project)
    assert (lab.hosts[0].work / "out/made_here").exists()


def test_work_folder_that_cannot_be_created_is_reported(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    (lab.hosts[0].home / "awsddp").write_text("a file")
    write_files(project, "a")
    with pytest.raises(NodesFailed, match="folders are not usable"):
        push(lab, project)


def test_interrupt_ends_the_transfer_and_the_next_sync_completes_it(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(1)
    (project / "big").write_bytes(os.urandom(2**20) * 8)
    lab.hosts[0].script("rsync", '#!/bin/sh\nexec /usr/bin/rsync --bwlimit=100 "$@"\n')

    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        push(lab, project, on_event=interrupt)
    assert threading.active_count() <= before + 4
    (lab.hosts[0].root / "bin/rsync").unlink()
    push(lab, project)
    work = lab.hosts[0].work
    wait_until(lambda: not list(work.glob(".big.*")), "the removal of the partial file by the receiver")
    assert read_tree(work) == read_tree(project)


@pytest.mark.usefixtures("by_rsync")
def test_missing_or_old_rsync_and_missing_ssh_are_reported(
    make_lab: MakeLab,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    lab = make_lab(1)
    write_files(project, "a")
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    rsync.find_rsync.cache_clear()
    request.addfinalizer(rsync.find_rsync.cache_clear)
    with pytest.raises(ConfigError, match="rsync not found"):
        push(lab, project)
    (programs / "rsync").write_text("#!/bin/sh\necho 'openrsync: protocol version 29'\n")
    (programs / "rsync").chmod(0o755)
    with pytest.raises(ConfigError, match="ssh not found"):
        push(lab, project)
    (programs / "ssh").symlink_to("/usr/bin/ssh")
    with pytest.raises(ConfigError, match=r"not rsync 3\.2\.5"):
        push(lab, project)
    for version, is_recent in {
        "2.6.9": False,
        "3.2.3": False,
        "3.2.5": True,
        "v3.2.7": True,
        "3.10.0": True,
    }.items():
        (programs / "rsync").write_text(f"#!/bin/sh\necho 'rsync  version {version}  protocol version 31'\n")
        rsync.find_rsync.cache_clear()
        with nullcontext() if is_recent else pytest.raises(ConfigError, match="conda install"):
            assert rsync.find_rsync() == str(programs / "rsync")


def test_ssh_reaches_the_nodes_through_the_ssh_config(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    for host in lab.hosts:
        assert lab.ssh(host.node, "pwd") == f"{host.home}\n"


def test_ssh_refuses_a_wrong_host_key(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    lab.hosts[0].stop()
    key = lab.hosts[0].root / "etc/ssh/ssh_host_ed25519_key"
    key.write_text(make_key("another").private)
    lab.hosts[0].start()
    result = subprocess.run(["ssh", "-F", lab.ssh_config, "node0", "pwd"], capture_output=True, text=True)
    assert result.returncode == 255
    assert "host key" in result.stderr.lower()


@pytest.mark.parametrize("name", ["a b", "per%cent", 'quo"te', "it's", "back\\slash", "~tilde", "#hash", "ü"])
def test_ssh_config_holds_any_path_that_ssh_can_use(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    endpoint = Endpoint(node=0, instance_id="i-0a", host="127.0.0.1", port=2222, user="ubuntu")
    config = tmp_path / "config"
    config.write_text(ssh_config([endpoint], make_login(folder)))
    output = subprocess.run(
        ["ssh", "-G", "-F", config, "node0"], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    assert settings["hostname"] == "127.0.0.1"
    assert settings["hostkeyalias"] == "i-0a"
    assert settings["stricthostkeychecking"] == "true"
    assert settings["identityfile"].replace("%%", "%").strip('"') == str(folder / "key")
    assert settings["userknownhostsfile"].replace("%%", "%").strip('"') == str(folder / "known_hosts")


@pytest.mark.parametrize("name", ["new\nline", "${HOME}"])
def test_path_that_ssh_cannot_use_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="ssh cannot use"):
        ssh_config([], make_login(tmp_path / name))


@pytest.mark.timeout(60)
def test_transfer_ends_if_its_progress_cannot_be_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text('#!/bin/bash\nwhile [ "$1" != rsync ]; do shift; done\nexec "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "there/large").write_bytes(bytes(50_000_000))

    def fail(event: Event) -> None:
        raise BrokenPipeError

    arguments = ["--bwlimit=200", f"host:{tmp_path}/there/", f"{tmp_path}/here/"]  # 250 s
    progress = rsync.Progress(0, "fetching", 1, fail)
    with pytest.raises(BrokenPipeError):
        rsync.transfer(
            arguments, ["large"], ssh_config=tmp_path / "none", stop=threading.Event(), progress=progress
        )


OTHER = "lr = 2\n"


def rewrite(path: Path, text: str) -> None:
    """Replace the text of a file by one of the same size, and keep its time."""
    info = path.stat()
    path.write_text(text)
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))


@pytest.mark.usefixtures("both_transports")
def test_changed_text_of_the_same_size_and_time_is_sent(make_lab: MakeLab, project: Path) -> None:
    lab = make_lab(2)
    (project / "config.py").write_text("lr = 1\n")
    push(lab, project)
    rewrite(project / "config.py", OTHER)
    assert [count.files for count in push(lab, project).values()] == [1, 1]
    assert [(host.work / "config.py").read_text() for host in lab.hosts] == [OTHER, OTHER]
    assert [count.files for count in push(lab, project).values()] == [0, 0]


@pytest.mark.usefixtures("both_transports")
def test_module_of_the_same_size_and_time_runs_in_its_new_version(
    make_lab: MakeLab, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would run the bytecode of the older version."""
    lab = make_lab(1)
    (project / "config.py").write_text("lr = 1\n")
    python = [sys.executable, "-c", "import config; print(config.lr)"]
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for text, output in (("lr = 1\n", "1\n"), (OTHER, "2\n")):
        rewrite(project / "config.py", text)
        push(lab, project)
        result = subprocess.run(python, cwd=lab.hosts[0].work, capture_output=True, text=True, check=True)
        assert result.stdout == output
        assert list((lab.hosts[0].work / "__pycache__").iterdir())


@pytest.mark.usefixtures("both_transports")
def test_file_rewritten_on_a_node_with_the_same_size_and_time_is_sent_again(
    make_lab: MakeLab, project: Path
) -> None:
    lab = make_lab(1)
    (project / "config.py").write_text("lr = 1\n")
    push(lab, project)
    rewrite(lab.hosts[0].work / "config.py", OTHER)
    assert push(lab, project)[0].files == 1
    assert (lab.hosts[0].work / "config.py").read_text() == "lr = 1\n"


def test_file_sent_before_the_connection_was_lost_is_removed_with_its_source(
    make_lab: MakeLab, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(1)
    (project / "x.py").write_text("a = 1\n")
    push(lab, project)
    (project / "x.py").write_text("a = 12\n")
    program = sync.template("work_folder.py")
    with monkeypatch.context() as patched:  # the file arrives, and is not recorded
        failing = program.replace("            record_versions(received)", "            os._exit(1)")
        assert failing != program
        patched.setattr(sync, "template", lambda name: failing)
        with pytest.raises(NodesFailed):
            push(lab, project)
    (project / "x.py").unlink()
    push(lab, project)
    assert not (lab.hosts[0].work / "x.py").exists()


def test_file_rewritten_on_a_node_with_the_same_size_and_time_is_not_removed(
    make_lab: MakeLab, project: Path
) -> None:
    lab = make_lab(1)
    (project / "w.bin").write_text("lr = 1\n")
    push(lab, project)
    rewrite(lab.hosts[0].work / "w.bin", OTHER)
    (project / "w.bin").unlink()
    push(lab, project)
    assert (lab.hosts[0].work / "w.bin").read_text() == OTHER


@pytest.mark.usefixtures("both_transports")
def test_file_of_another_machine_with_the_same_size_and_time_is_replaced(
    make_lab: MakeLab, project: Path, tmp_path: Path
) -> None:
    lab, other = make_lab(1), tmp_path / "other machine"
    other.mkdir()
    for folder, text in ((project, "lr = 1\n"), (other, OTHER)):
        (folder / "config.py").write_text(text)
        os.utime(folder / "config.py", (1577836800, 1577836800))
    for folder in (project, other, project):
        push(lab, folder)
        assert (lab.hosts[0].work / "config.py").read_text() == (folder / "config.py").read_text()


@pytest.mark.usefixtures("both_transports")
@pytest.mark.parametrize("is_unknown", [True, False])
def test_touched_file_or_file_of_unknown_version_is_not_sent_again(
    make_lab: MakeLab, project: Path, is_unknown: bool
) -> None:
    """As after a sync by an older awsddp, after chmod -R, and if inodes are not stable."""
    lab = make_lab(1)
    (project / "config.py").write_text("lr = 1\n")
    (project / "link").symlink_to("config.py")
    push(lab, project)
    if is_unknown:
        (lab.hosts[0].work.parent / ".work.versions").unlink()
    os.link(project / "config.py", project.parent / "another name")
    inode = (lab.hosts[0].work / "config.py").stat().st_ino
    assert push(lab, project)[0].files == 0
    (project / "config.py").unlink()
    (project.parent / "another name").rename(project / "config.py")
    assert push(lab, project)[0].files == 0
    assert (lab.hosts[0].work / "config.py").stat().st_ino == inode
