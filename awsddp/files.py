"""The nodes by hand: the working folder to them, a command on them, a shell on one."""

import contextlib
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.advice import advised, command_words
from awsddp.config import overlaid
from awsddp.errors import AwsddpError, NodeError
from awsddp.jobs.protocol import FIRST_PORT
from awsddp.jobs.ranks import Rendezvous, fill, layout
from awsddp.known import told_jobs
from awsddp.nodes.failures import split
from awsddp.parallel import both
from awsddp.plan.environment import source_folders
from awsddp.reach import choose_nodes, login_nodes, publish
from awsddp.records import Cause, JobRecord
from awsddp.report import Event, node_name
from awsddp.resources import BUNDLED, shipped_folder
from awsddp.returns import ExecDocument, Kept, NodeFiles, NodeOutput, PathSize, SyncDocument
from awsddp.search import naming_holder
from awsddp.spec import Given
from awsddp.state import Record

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.results import Fetched
    from awsddp.nodes.sync import Listing, Sent
    from awsddp.nodes.transport import Fleet, Result


LARGE_BYTES = 100e6

# What is the user's comes as words of its own: nothing is pasted into the script.
_RUN = 'PATH="$1:$PATH"; export PATH; shift; cd ~/awsddp/work 2>/dev/null || cd; exec "$@"'
_MISSING = 'cd ~/awsddp/work 2>/dev/null; for name; do [ -e "$name" ] || printf "%s\\0" "$name"; done'
_LOOK_S = 20.0
OnOutput = Callable[[int, bytes, bool], None]
"""Gets a node's number, what it said, and whether it said so on stderr."""
_FILES = ("requirements.txt", "uv.lock", "pyproject.toml", "environment.yml")
_MODULE = re.compile(r"\w[\w.]*")
_WORD = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|([^\s'\",;:()]+)")
_VARIABLE = re.compile(r"\bos\b.*^KeyError: '([A-Z_][A-Z0-9_]*)'", re.DOTALL | re.MULTILINE)
_ON_NODE = re.compile(r"^(.*/awsddp/work[^/]*/|\./)")


def sync(cluster: "Cluster", *, confirm: Callable[[str], None]) -> SyncDocument:
    """Send the working folder, and return what went as the `sync` document.

    `confirm` is called if a job runs, whose code would change, and raises to
    refuse. Raises ConfigError for an invalid folder, NodeError for nodes that did not receive the files.
    """
    listing = listed_files(cluster)
    with cluster.ready() as cluster, cluster.connect() as fleet:
        for job in told_jobs(cluster) if cluster.unfetched else ():  # the tags tell: no request without need
            if job.state == "running":
                confirm(f"Job {job.job} runs on the nodes: its files change while it reads them.")
        with cluster.folder.lock("sync", wait_s=60):
            sent = moved(send(cluster, fleet, listing))
    kept: dict[str, list[str]] = {}
    for path, by in listing.kept:
        kept.setdefault(by, []).append(path)
    return SyncDocument(
        nodes=sent,
        files=tuple(entry.path for entry in listing.entries),
        largest=tuple(PathSize(path=path, bytes=size) for path, size in listing.largest(5)),
        kept=tuple(Kept(by=by, paths=tuple(paths)) for by, paths in kept.items()),
    )


def listed_files(cluster: "Cluster") -> "Listing":
    """Return what to send of the working folder; say so if it is large. Raises ConfigError."""
    listing = found_here(cluster)
    if listing.size > LARGE_BYTES:
        largest = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in listing.largest())
        cluster.say(f"{listing.size / 1e6:.0f} MB go to each node; the largest: {largest}")
    for path, why in listing.skipped:
        cluster.on_event(Event(f"not sent: {path}: {why}"))
    return listing


def found_here(cluster: "Cluster") -> "Listing":
    """Return what to send of the working folder. Raises ConfigError."""
    from awsddp.nodes.sync import files_to_send

    job = cluster.job_spec
    return files_to_send(
        Path(job.sync.workdir), job.sync.ignore, results=job.job.results, exclude=(cluster.home,)
    )


def send(
    cluster: "Cluster",
    fleet: "Fleet",
    listing: "Listing",
    *,
    folder: str = "work",
    nodes: Collection[int] | None = None,
    bundled: bool = False,
) -> "dict[int, Sent]":
    """Send a folder to nodes (all), and with `bundled` the programs that ship with awsddp."""
    from awsddp.nodes.sync import files_to_send, push

    work = partial(push, listing, fleet, folder=folder, nodes=nodes, on_event=cluster.on_event)
    if not bundled:
        return work()
    programs = files_to_send(shipped_folder(BUNDLED))
    sent, _ = both(work, lambda: push(programs, fleet, folder=BUNDLED, nodes=nodes))
    return sent


def moved(files: "Mapping[int, Sent | Fetched]") -> tuple[NodeFiles, ...]:
    """Return what was sent to each node, or fetched from it, in order."""
    return tuple(
        NodeFiles(node=node, files=one.files, bytes=one.bytes) for node, one in sorted(files.items())
    )


def exec(
    cluster: "Cluster", *, words: Sequence[str], node: int | None, stdin: bytes, on_output: OnOutput
) -> ExecDocument:
    """Run a command on all nodes (or `node`) and return the `exec` document, whatever its exit codes.

    Several words are a program and its arguments, one word is a line for bash. Placeholders are those of a
    rank per node. `stdin` goes to every node. Raises NotFoundError or NodeError for nodes that are not there
    or are lost.
    """
    argv = list(words) if len(words) > 1 else ["bash", "-c", words[0]]
    said: dict[tuple[int, bool], bytearray] = {}

    def on_data(number: int, data: bytes, error: bool = False) -> None:
        said.setdefault((number, error), bytearray()).extend(data)
        on_output(number, data, error)

    with cluster.ready(node=node) as cluster:
        nodes = choose_nodes(cluster.nodes, node)
        with cluster.connect(nodes) as fleet:
            lines = _lines(cluster, {one.node for one in nodes}, argv)
            requests = {number: (line, stdin) for number, line in lines.items()}
            ends = fleet.stream(
                requests,
                on_data,
                on_stderr=lambda number, data: on_data(number, data, True),
            )
            results = split(ends)
            _say_missing(cluster, fleet, [node for node, end in results.items() if end.exit_code], words)
    return ExecDocument(
        nodes=tuple(
            NodeOutput(
                node=number,
                exit_code=end.exit_code,
                stdout=bytes(said.get((number, False), b"")).decode(errors="replace"),
                stderr=bytes(said.get((number, True), b"")).decode(errors="replace"),
            )
            for number, end in sorted(results.items())
        )
    )


def _lines(cluster: "Cluster", chosen: Collection[int], argv: Sequence[str]) -> dict[int, list[str]]:
    """Return the command of each chosen node; its rank is that among all nodes of the cluster."""
    nodes = sorted(cluster.nodes, key=lambda one: one.node)
    rendezvous = Rendezvous(job="exec", master_addr=str(nodes[0].private_ip), master_port=FIRST_PORT)
    return {
        rank.node: [
            *("sh", "-c", _RUN, "sh", posixpath.dirname(cluster.record.on(rank.node).ranks_python)),
            *(fill(word, rank, rendezvous=rendezvous) for word in argv),
        ]
        for rank in layout([one.node for one in nodes], gpus=0, nproc_per_node=1)
        if rank.node in chosen
    }


def _say_missing(cluster: "Cluster", fleet: "Fleet", nodes: Collection[int], words: Sequence[str]) -> None:
    """Say which files that a failed command names are here alone, and what sends them."""
    named = _named_files(Path(cluster.job_spec.sync.workdir), words)
    if not (nodes and named):
        return
    answers: Mapping[int, Result] = {}
    with contextlib.suppress(NodeError):
        answers = fleet.run(["sh", "-c", _MISSING, "sh", *named], nodes=nodes, timeout_s=_LOOK_S)
    missing = {name for one in answers.values() for name in one.stdout.decode(errors="replace").split("\0")}
    listing = found_here(cluster) if missing.intersection(named) else None
    for name in named:
        if listing is not None and name in missing:
            found = listing.keeper(name)
            why = (
                f"{found[1]} keeps {found[0]} here" if found else advised(cluster, "awsddp sync   # sends it")
            )
            cluster.say(f"{name} is here, and not on the nodes: {why}")


def _named_files(workdir: Path, words: Sequence[str]) -> list[str]:
    """Return the words of a command that are files of the synced folder."""
    try:
        split = shlex.split(words[0]) if len(words) == 1 else list(words)
    except ValueError:
        split = words[0].split()
    found = dict.fromkeys(
        word.removeprefix("./") for word in split if word and not word.startswith(("-", "/"))
    )
    # Unlike Path.exists it is False, too, for a name that no file can have.
    return [word for word in found if word and os.path.exists(workdir / word)]  # noqa: PTH110


def ssh(cluster: "Cluster", *, node: int, words: Sequence[str], ports: Sequence[str], tty: bool) -> list[str]:
    """Return the command line that opens a shell on a node, or runs `words` there as ssh does.

    `ports` are forwarded, as "6006:localhost:6006". With `tty` a command gets a terminal.
    The node need not be ready, nor the others reachable. Raises NotFoundError, and NodeError for a node that
    does not run, or whose host key is not known yet.
    """
    from awsddp.nodes import hostkeys

    with naming_holder(cluster), cluster.find() as cluster:
        nodes = login_nodes(cluster)
        (chosen,) = choose_nodes(nodes, node)
        if chosen.state != "running" or chosen.address is None:
            raise NodeError(
                f"{node_name(node)} is not running", f"it is {chosen.state}", "awsddp up   # start it"
            )
        if chosen.instance_id not in hostkeys.read(cluster.folder.known_hosts):
            raise NodeError(
                f"{node_name(node)} is being prepared",
                "its host key is not known yet",
                "awsddp up   # finish it",
            )
        publish(cluster)
        words = [*(["-t"] if tty and words else []), node_name(node), *_command(cluster.record, node, words)]
        forwards = [word for port in ports for word in ("-L", port)]
        options = ["-o", "ExitOnForwardFailure=yes", *forwards] if ports else []
        return ["ssh", "-F", str(cluster.folder.ssh_config), *options, *words]


def _command(record: Record, node: int, words: Sequence[str]) -> list[str]:
    """Return the command as the node's shell gets it: with the PATH that a login shell has there."""
    python = next((one.ranks_python for one in record.prepared if one.node == node), None)
    if not words or python is None:
        return ["--", *words] if words else []
    return ["--", f'export PATH={shlex.quote(posixpath.dirname(python))}:"$PATH";', *words]


def explained(cluster: "Cluster", job: JobRecord) -> JobRecord:
    """Return the job; for a module, a file or a variable that its nodes do not have the cause says why."""
    cause = job.cause
    if cause is None:
        return job
    explain = {"import_error": _of_module, "file_not_found": _of_file, "exit": _of_variable}.get(cause.kind)
    with contextlib.suppress(AwsddpError, OSError, ValueError):  # the project has changed, or is gone
        if explain is not None:
            cause = explain(cluster, job, cause)
    return replace(job, cause=replace(cause, next=advised(cluster, cause.next, job=job)))


def _of_module(cluster: "Cluster", job: JobRecord, cause: Cause) -> Cause:
    module = cause.values.get("module", "")
    if not _MODULE.fullmatch(module):  # a node says it, and a command that the user copies will hold it
        return cause
    top = module.partition(".")[0]
    project, listing = Path(cluster.job_spec.sync.workdir), found_here(cluster)
    for path in _modules(project, module):
        if kept := listing.keeper(path):
            return _kept_here(cluster, job, cause, kept)
    for path in _modules(project, top):
        folder = Path(path).parent.as_posix()
        if folder in (*source_folders(project), Path(job.script or "").parent.as_posix()):
            return cause  # the script's own folder is where its imports come from
        advice = _again(cluster, job, {"env.variables.PYTHONPATH": folder})
        return _told(cause, f"{path} is on the nodes, and {folder} is not on the PYTHONPATH", advice)
    if module != top:  # Python names the whole path only where the package itself was found
        why = f"What imports it was written for another version of {top}"
        return _told(cause, why, f"set another version of it, or of {top}, with --env FILE")
    record = cluster.folder.read()
    asked = overlaid(cluster.job_spec, record.asked if record else {}).env.file
    there = next((file for file in _FILES if (project / file).is_file()), None)
    file = asked or ((project / there).as_posix() if there else "requirements.txt")
    again = _again(cluster, job, {"env.file": file})
    if there and not asked:
        return _told(cause, f"{there} exists, but --env does not name it", again)
    why = f"{asked} did not install it" if asked else "no requirements file is there"
    return _told(cause, why, f"name the package of {top} in {file}, then: {again}")


def _of_file(cluster: "Cluster", job: JobRecord, cause: Cause) -> Cause:
    listing = found_here(cluster)
    for match in _WORD.finditer(cause.explanation):
        word = _ON_NODE.sub("", (match[1] or match[2] or match[3]).rstrip("./"))
        if kept := listing.keeper(word):
            return _kept_here(cluster, job, cause, kept)
        for path, reason in listing.skipped:
            if f"{word}/".startswith(f"{path}/"):
                advice = "copy what it leads to into the folder, or onto each node: awsddp exec -- COMMAND"
                return _told(cause, f"{path} is here, and is not sent: {reason}", advice)
        if word.startswith("/") and Path(word).exists():
            why = f"{word} is on this machine alone: only the synced folder is sent"
            return _told(cause, why, f"move it into {listing.root}, or put it on the nodes")
    return cause


def _of_variable(cluster: "Cluster", job: JobRecord, cause: Cause) -> Cause:
    found = _VARIABLE.search("\n".join(cause.tail))
    if found is None or found[1] not in os.environ:
        return cause
    advice = _again(cluster, job, {f"env.variables.{found[1]}": None})
    return _told(cause, f"{found[1]} is set here, and not on the nodes", advice)


def _kept_here(cluster: "Cluster", job: JobRecord, cause: Cause, kept: tuple[str, str]) -> Cause:
    """Say that a path is here, and what keeps it from the nodes; advise to send all of its folder."""
    path, by = kept
    folder = path.rpartition("/")[0]
    let_in = f"!/{folder}/**" if folder and not path.endswith("/") else f"!/{path}"
    patterns = [*cluster.job_spec.sync.ignore, let_in]
    advice = {
        "sync.ignore": "remove it from sync.ignore",
        "awsddp": f"move it out of {path}, which is never sent",
    }.get(by, f"{_again(cluster, job, {'sync.ignore': patterns})}   # or in awsddp.toml")
    return _told(cause, f"{path} is here, and {by} keeps it from the nodes", advice)


def _again(cluster: "Cluster", job: JobRecord, changes: Mapping[str, Given]) -> str:
    """Return the command that runs the job again with `changes`, by key of awsddp.toml."""
    return advised(cluster, shlex.join(["awsddp", "train", *command_words("train", changes)]), job=job)


def _told(cause: Cause, why: str, advice: str) -> Cause:
    return replace(cause, explanation=f"{cause.explanation} {why}.", next=advice)


def _modules(project: Path, module: str) -> Iterator[str]:
    """Yield where the project, or a folder at its top, has a module: its path, relative to the project."""
    tops = [one.name for one in sorted(project.iterdir()) if one.is_dir() and not one.name.startswith(".")]
    for folder in ("", *tops):
        path = Path(folder, *module.split("."))
        if any((project / path).glob("*.py")):
            yield path.as_posix()
        elif (project / f"{path}.py").is_file():
            yield f"{path.as_posix()}.py"
