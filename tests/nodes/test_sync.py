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
from tests.support.project_folder import HELL, make
from tests.support.ssh_hosts import Host, Lab, wait_until

MakeLab = Callable[[int], Lab]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The project folder, with a name that needs quoting."""
    folder = tmp_path / "my project's $HOME"
    folder.mkdir()
    return folder


@pytest.fixture(params=["at once", "by rsync"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little goes over the open connection, much by rsync: the same must come of both."""
    if request.param == "by rsync":
        monkeypatch.setattr(sync, "AT_ONCE_BYTES", -1)


@pytest.fixture
def by_rsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "AT_ONCE_BYTES", -1)


def push(lab: Lab, home: Path, *ignore: str, **settings: object) -> dict[int, NodeFiles]:
    with lab.fleet() as fleet:
        listing = list_files_to_send(home, ignore)
        return sync.push(listing, fleet, **settings)  # type: ignore[arg-type]


def login_in(folder: Path) -> Login:
    return Login(key=folder / "key", known_hosts=folder / "known_hosts", ssh_config=folder / "config")


def tree(root: Path) -> dict[str, object]:
    """All that a folder holds: file contents, link targets, None for folders."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.usefixtures("either_way")
def test_the_work_folder_of_each_node_becomes_like_home(lab: MakeLab, home: Path) -> None:
    two = lab(2)
    make(home, "a.py", "pkg/b.py")
    (home / "empty").mkdir()
    (home / "link").symlink_to("pkg/b.py")
    (home / "run.sh").write_text("#!/bin/sh\n")
    (home / "run.sh").chmod(0o750)
    said: list[Event] = []
    sent = push(two, home, on_event=said.append)
    for host in two.hosts:
        assert tree(host.work) == tree(home)
        assert (host.work / "run.sh").stat().st_mode & 0o777 == 0o750
        assert (host.work / "a.py").stat().st_mtime_ns == (home / "a.py").stat().st_mtime_ns
    size = sum(path.lstat().st_size for path in home.rglob("*") if not path.is_dir() or path.is_symlink())
    assert sent == {0: NodeFiles(node=0, files=5, bytes=size), 1: NodeFiles(node=1, files=5, bytes=size)}
    assert {event.who for event in said} == {"node0", "node1"}
    assert said[-1].fraction == 1.0


@pytest.mark.usefixtures("either_way")
def test_a_second_time_nothing_goes_and_then_only_what_differs(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "a", "b", "c", "d")
    (home / "link").symlink_to("a")
    push(one, home)
    assert push(one, home) == {0: NodeFiles(node=0, files=0, bytes=0)}
    before = (home / "b").stat()
    (home / "b").write_bytes(b"X" * before.st_size)
    os.utime(home / "b", ns=(before.st_mtime_ns, before.st_mtime_ns + 1))  # the same second, the same size
    (home / "c").chmod(0o700)
    (one.hosts[0].work / "d").unlink()
    (home / "link").unlink()
    (home / "link").symlink_to("b")
    assert push(one, home)[0].files == 4
    assert tree(one.hosts[0].work) == tree(home)
    assert push(one, home)[0].files == 0


def test_how_much_goes_is_told_when_it_is_much_and_goes(
    lab: MakeLab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("awsddp.nodes.sync.LARGE_BYTES", 1e6)
    one, said = lab(1), list[Event]()
    make(home, "a.py", "data/b")
    (home / "data" / "b").write_bytes(bytes(2_000_000))
    for _ in range(2):
        push(one, home, on_event=said.append)
    assert [event.text for event in said if event.who is None] == [
        "2.0 MB go to each node; the largest: data/ 2.0 MB"
    ]


def test_only_the_node_that_differs_gets_anything(lab: MakeLab, home: Path) -> None:
    two = lab(2)
    make(home, "a", "b")
    push(two, home)
    (two.hosts[1].work / "a").write_text("spoiled")
    assert push(two, home) == {0: NodeFiles(node=0, files=0, bytes=0), 1: NodeFiles(node=1, files=1, bytes=2)}


def test_what_a_node_made_stays(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "train.py", "pkg/old.py")
    push(one, home)
    work = one.hosts[0].work
    make(work, "saved_models/x.pth", "data/stl10.bin", "pkg/made_here.txt")
    (home / "pkg/old.py").unlink()
    (home / "pkg").rmdir()
    make(home, "new.py")
    push(one, home)
    assert set(tree(work)) == {
        *("train.py", "new.py", "pkg", "pkg/made_here.txt"),
        *("saved_models", "saved_models/x.pth", "data", "data/stl10.bin"),
    }


@pytest.mark.usefixtures("either_way")
def test_what_is_gone_at_home_goes_on_the_node_with_the_folders_it_leaves_empty(
    lab: MakeLab, home: Path
) -> None:
    one = lab(1)
    make(home, "a", "old/deep/b", "old/deep/c", "kept/d")
    (home / "empty").mkdir()
    (home / "link").symlink_to("a")
    push(one, home)
    for path in ("old/deep/b", "old/deep/c", "kept/d", "link"):
        (home / path).unlink()
    for path in ("old/deep", "old", "empty"):
        (home / path).rmdir()
    push(one, home)
    assert set(tree(one.hosts[0].work)) == {"a", "kept"}


def test_what_is_gone_at_home_but_changed_on_the_node_stays(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "metrics.json", "a")
    push(one, home)
    (one.hosts[0].work / "metrics.json").write_text("made on the node")
    (home / "metrics.json").unlink()
    push(one, home)
    push(one, home)
    assert (one.hosts[0].work / "metrics.json").read_text() == "made on the node"


def test_what_is_newly_ignored_stays_until_it_is_gone_at_home(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "data/set.bin", "a")
    push(one, home)
    push(one, home, "data/")
    assert (one.hosts[0].work / "data/set.bin").exists()
    (home / "data/set.bin").unlink()
    (home / "data").rmdir()
    push(one, home)
    assert set(tree(one.hosts[0].work)) == {"a"}


@pytest.mark.usefixtures("either_way")
def test_files_folders_and_links_may_take_each_others_place(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "one", "two/x", "three/y", "four")
    push(one, home)
    (home / "one").unlink()
    make(home, "one/inside")
    (home / "two/x").unlink()
    (home / "two").rmdir()
    make(home, "two")
    (home / "three").rename(home / "five")
    (home / "three").symlink_to("five")
    (home / "four").unlink()
    (home / "four").symlink_to("two")
    push(one, home)
    assert tree(one.hosts[0].work) == tree(home)


@pytest.mark.usefixtures("either_way")
def test_any_name_arrives(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, *HELL, *(f"dir {name}/{name}" for name in HELL))
    push(one, home)
    assert tree(one.hosts[0].work) == tree(home)
    assert push(one, home)[0].files == 0
    for name in HELL:
        (home / name).unlink()
    push(one, home)
    assert tree(one.hosts[0].work) == tree(home)
    assert not list(one.folder.rglob("canary"))


def test_another_folder_is_kept_apart(lab: MakeLab, home: Path, tmp_path: Path) -> None:
    one = lab(1)
    make(home, "a")
    other = tmp_path / "train"
    make(other, "main.py")
    push(one, home)
    push(one, other, folder="train")
    push(one, home)
    assert set(tree(one.hosts[0].home)) == {
        *("awsddp", "awsddp/train.sent", "awsddp/.train.versions", "awsddp/train", "awsddp/train/main.py"),
        *("awsddp/work.sent", "awsddp/.work.versions", "awsddp/work", "awsddp/work/a"),
    }


@pytest.mark.usefixtures("either_way")
def test_a_node_cannot_ask_for_what_is_not_listed(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "a", ".git/secret")
    (home.parent / "key").write_text("private")
    answer = r"changed a\0changed .git/secret\0unsure 0 ../key\0changed /etc/passwd\0missing ../key\0"
    one.hosts[0].script("python3", f"#!/bin/sh\ncat >> '{{root}}/heard'\nprintf '\\0{answer}'\n")
    (one.hosts[0].work).mkdir(parents=True)
    assert push(one, home)[0].files == 1
    heard = (one.hosts[0].root / "heard").read_bytes()
    assert (b" a" in heard, b"private" in heard, b"secret" in heard) == (True, False, False)
    assert set(tree(one.hosts[0].work)) <= {"a"}
    assert (home.parent / "key").exists()


@pytest.mark.usefixtures("either_way")
def test_a_talkative_login_shell_does_not_disturb(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    enter = one.hosts[0].root / "enter"
    enter.write_text(
        enter.read_text().replace("exec ", 'case "$SSH_ORIGINAL_COMMAND" in p*) echo hi;; esac\nexec ')
    )
    make(home, "a")
    assert push(one, home)[0].files == 1


def test_holes_stay_holes(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    with (home / "holes").open("wb") as stream:
        stream.truncate(20_000_000)
        stream.seek(10_000_000)
        stream.write(b"data")
    assert push(one, home) == {0: NodeFiles(node=0, files=1, bytes=20_000_000)}
    there = one.hosts[0].work / "holes"
    assert there.read_bytes() == (home / "holes").read_bytes()
    assert there.stat().st_blocks * 512 < 1_000_000


@pytest.mark.usefixtures("either_way")
def test_a_file_that_vanishes_meanwhile_is_no_error(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(home, "a", "b")
    with one.fleet() as fleet:
        listing = list_files_to_send(home)
        (home / "b").unlink()
        sync.push(listing, fleet)
    assert set(tree(one.hosts[0].work)) == {"a"}


def test_a_little_that_changed_needs_no_rsync(lab: MakeLab, home: Path) -> None:
    two = lab(2)
    make(home, "a", "pkg/b")
    for host in two.hosts:
        failing(host)("exit 1")
    assert {node: sent.files for node, sent in push(two, home).items()} == {0: 2, 1: 2}
    assert [tree(host.work) for host in two.hosts] == [tree(home)] * 2
    assert {path.name for path in (two.hosts[0].home / "awsddp").iterdir()} == {
        *("work", "work.sent", ".work.versions"),
    }


def test_what_cannot_be_put_in_place_at_once_leaves_nothing_beside_it(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(one.hosts[0].work, "out/made_here")
    make(home, "out")
    with pytest.raises(NodesFailed, match="out"):
        push(one, home)
    assert {path.name for path in (one.hosts[0].home / "awsddp").iterdir()} == {"work", "work.sent"}


def failing(one: Host) -> Callable[[str], None]:
    return lambda text: one.script("rsync", f"#!/bin/sh\n{text}\n")


@pytest.mark.usefixtures("by_rsync")
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo 'rsync: command not found' >&2; exit 127", "rsync is not installed"),
        ("echo 'rsync: write failed: No space left on device (28)' >&2; exit 11", "a disk is full"),
        ("kill -9 $PPID", "the transfer was interrupted"),
        ("echo oops >&2; exit 2", "exit"),
    ],
)
def test_a_transfer_that_fails_says_why_and_the_others_are_complete(
    lab: MakeLab, home: Path, program: str, said: str
) -> None:
    two = lab(2)
    failing(two.hosts[1])(program)
    make(home, "a")
    with pytest.raises(NodesFailed, match=said) as caught:
        push(two, home)
    assert list(caught.value.failures) == [1]
    assert tree(two.hosts[0].work) == tree(home)


@pytest.mark.usefixtures("either_way")
def test_something_made_on_the_node_that_is_in_the_way_is_named(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    make(one.hosts[0].work, "out/made_here")
    make(home, "out")
    with pytest.raises(NodesFailed, match="out"):
        push(one, home)
    assert (one.hosts[0].work / "out/made_here").exists()


def test_a_work_folder_that_cannot_be_made_is_said(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    (one.hosts[0].home / "awsddp").write_text("a file")
    make(home, "a")
    with pytest.raises(NodesFailed, match="folders are not usable"):
        push(one, home)


def test_an_interrupt_ends_the_transfer_and_the_next_sync_finishes_it(lab: MakeLab, home: Path) -> None:
    one = lab(1)
    (home / "big").write_bytes(os.urandom(2**20) * 8)
    one.hosts[0].script("rsync", '#!/bin/sh\nexec /usr/bin/rsync --bwlimit=100 "$@"\n')

    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        push(one, home, on_event=interrupt)
    assert threading.active_count() <= before + 4
    (one.hosts[0].root / "bin/rsync").unlink()
    push(one, home)
    work = one.hosts[0].work
    wait_until(lambda: not list(work.glob(".big.*")), "the receiver that was cut removes what it had")
    assert tree(work) == tree(home)


@pytest.mark.usefixtures("by_rsync")
def test_without_rsync_or_ssh_at_home_that_is_said(
    lab: MakeLab,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    one = lab(1)
    make(home, "a")
    bin = tmp_path / "bin"
    bin.mkdir()
    monkeypatch.setenv("PATH", str(bin))
    rsync.find_rsync.cache_clear()
    request.addfinalizer(rsync.find_rsync.cache_clear)
    with pytest.raises(ConfigError, match="rsync not found"):
        push(one, home)
    (bin / "rsync").write_text("#!/bin/sh\necho 'openrsync: protocol version 29'\n")
    (bin / "rsync").chmod(0o755)
    with pytest.raises(ConfigError, match="ssh not found"):
        push(one, home)
    (bin / "ssh").symlink_to("/usr/bin/ssh")
    with pytest.raises(ConfigError, match=r"not rsync 3\.2\.5"):
        push(one, home)
    for version, is_late in {
        "2.6.9": False,
        "3.2.3": False,
        "3.2.5": True,
        "v3.2.7": True,
        "3.10.0": True,
    }.items():
        (bin / "rsync").write_text(f"#!/bin/sh\necho 'rsync  version {version}  protocol version 31'\n")
        rsync.find_rsync.cache_clear()
        with nullcontext() if is_late else pytest.raises(ConfigError, match="conda install"):
            assert rsync.find_rsync() == str(bin / "rsync")


def test_ssh_and_rsync_reach_the_nodes_through_the_ssh_config(lab: MakeLab) -> None:
    two = lab(2)
    for host in two.hosts:
        assert two.ssh(host.node, "pwd") == f"{host.home}\n"


def test_ssh_is_as_strict_as_we_are(lab: MakeLab) -> None:
    two = lab(2)
    two.hosts[0].stop()
    key = two.hosts[0].root / "etc/ssh/ssh_host_ed25519_key"
    key.write_text(make_key("another").private)
    two.hosts[0].start()
    done = subprocess.run(["ssh", "-F", two.ssh_config, "node0", "pwd"], capture_output=True, text=True)
    assert done.returncode == 255
    assert "host key" in done.stderr.lower()


@pytest.mark.parametrize("name", ["a b", "per%cent", 'quo"te', "it's", "back\\slash", "~tilde", "#hash", "ü"])
def test_ssh_config_holds_any_path_that_ssh_can_use(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    endpoint = Endpoint(node=0, instance_id="i-0a", host="127.0.0.1", port=2222, user="ubuntu")
    config = tmp_path / "config"
    config.write_text(ssh_config([endpoint], login_in(folder)))
    told = subprocess.run(
        ["ssh", "-G", "-F", config, "node0"], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(line.split(" ", 1) for line in told.splitlines() if " " in line)
    assert settings["hostname"] == "127.0.0.1"
    assert settings["hostkeyalias"] == "i-0a"
    assert settings["stricthostkeychecking"] == "true"
    assert settings["identityfile"].replace("%%", "%").strip('"') == str(folder / "key")
    assert settings["userknownhostsfile"].replace("%%", "%").strip('"') == str(folder / "known_hosts")


@pytest.mark.parametrize("name", ["new\nline", "${HOME}"])
def test_a_path_that_ssh_cannot_use_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="ssh cannot use"):
        ssh_config([], login_in(tmp_path / name))


@pytest.mark.timeout(60)
def test_transfer_ends_where_its_progress_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text('#!/bin/bash\nwhile [ "$1" != rsync ]; do shift; done\nexec "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "there/large").write_bytes(bytes(50_000_000))

    def gone(event: Event) -> None:
        raise BrokenPipeError

    words = ["--bwlimit=200", f"host:{tmp_path}/there/", f"{tmp_path}/here/"]  # 250 s
    progress = rsync.Progress(0, "fetching", 1, gone)
    with pytest.raises(BrokenPipeError):
        rsync.transfer(
            words, ["large"], ssh_config=tmp_path / "none", stop=threading.Event(), progress=progress
        )


OTHER = "lr = 2\n"


def rewrite(path: Path, text: str) -> None:
    """Give a file other text of the same size, and its old time."""
    info = path.stat()
    path.write_text(text)
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))


@pytest.mark.usefixtures("either_way")
def test_other_text_of_the_same_size_and_time_goes_out(lab: MakeLab, home: Path) -> None:
    two = lab(2)
    (home / "config.py").write_text("lr = 1\n")
    push(two, home)
    rewrite(home / "config.py", OTHER)
    assert [one.files for one in push(two, home).values()] == [1, 1]
    assert [(host.work / "config.py").read_text() for host in two.hosts] == [OTHER, OTHER]
    assert [one.files for one in push(two, home).values()] == [0, 0]


@pytest.mark.usefixtures("either_way")
def test_a_module_of_the_same_size_and_time_runs_as_it_was_sent(
    lab: MakeLab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes its bytecode of the older one for it."""
    one = lab(1)
    (home / "config.py").write_text("lr = 1\n")
    python = [sys.executable, "-c", "import config; print(config.lr)"]
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for text, said in (("lr = 1\n", "1\n"), (OTHER, "2\n")):
        rewrite(home / "config.py", text)
        push(one, home)
        ran = subprocess.run(python, cwd=one.hosts[0].work, capture_output=True, text=True, check=True)
        assert ran.stdout == said
        assert list((one.hosts[0].work / "__pycache__").iterdir())


@pytest.mark.usefixtures("either_way")
def test_what_a_node_wrote_with_the_size_and_time_of_what_came_is_sent_again(
    lab: MakeLab, home: Path
) -> None:
    one = lab(1)
    (home / "config.py").write_text("lr = 1\n")
    push(one, home)
    rewrite(one.hosts[0].work / "config.py", OTHER)
    assert push(one, home)[0].files == 1
    assert (one.hosts[0].work / "config.py").read_text() == "lr = 1\n"


def test_what_came_last_before_the_connection_was_lost_is_removed_when_it_is_gone_at_home(
    lab: MakeLab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lab(1)
    (home / "x.py").write_text("a = 1\n")
    push(one, home)
    (home / "x.py").write_text("a = 12\n")
    program = sync.template("work_folder.py")
    with monkeypatch.context() as patched:  # it comes, and is not noted
        lost = program.replace("            record_versions(received)", "            os._exit(1)")
        assert lost != program
        patched.setattr(sync, "template", lambda name: lost)
        with pytest.raises(NodesFailed):
            push(one, home)
    (home / "x.py").unlink()
    push(one, home)
    assert not (one.hosts[0].work / "x.py").exists()


def test_what_a_node_wrote_with_the_size_and_time_of_what_came_is_not_removed(
    lab: MakeLab, home: Path
) -> None:
    one = lab(1)
    (home / "w.bin").write_text("lr = 1\n")
    push(one, home)
    rewrite(one.hosts[0].work / "w.bin", OTHER)
    (home / "w.bin").unlink()
    push(one, home)
    assert (one.hosts[0].work / "w.bin").read_text() == OTHER


@pytest.mark.usefixtures("either_way")
def test_what_another_machine_sent_with_the_same_size_and_time_is_replaced(
    lab: MakeLab, home: Path, tmp_path: Path
) -> None:
    one, there = lab(1), tmp_path / "other machine"
    there.mkdir()
    for folder, text in ((home, "lr = 1\n"), (there, OTHER)):
        (folder / "config.py").write_text(text)
        os.utime(folder / "config.py", (1577836800, 1577836800))
    for folder in (home, there, home):
        push(one, folder)
        assert (one.hosts[0].work / "config.py").read_text() == (folder / "config.py").read_text()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("forgets", [True, False])
def test_what_was_only_touched_or_is_of_an_unknown_version_does_not_travel(
    lab: MakeLab, home: Path, forgets: bool
) -> None:
    """As after a first sync by an older awsddp, after chmod -R, and where inodes are not stable."""
    one = lab(1)
    (home / "config.py").write_text("lr = 1\n")
    (home / "link").symlink_to("config.py")
    push(one, home)
    if forgets:
        (one.hosts[0].work.parent / ".work.versions").unlink()
    os.link(home / "config.py", home.parent / "another name")
    inode = (one.hosts[0].work / "config.py").stat().st_ino
    assert push(one, home)[0].files == 0
    (home / "config.py").unlink()
    (home.parent / "another name").rename(home / "config.py")
    assert push(one, home)[0].files == 0
    assert (one.hosts[0].work / "config.py").stat().st_ino == inode
