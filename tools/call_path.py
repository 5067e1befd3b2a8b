"""Count the files that a reader of a verb's story visits, and the returns to a file already visited.

    python tools/call_path.py train [FOLDER]    # to the launch request of the first rank
    python tools/call_path.py up [FOLDER]       # to the first call to AWS
    python tools/call_path.py down [FOLDER]     # to the call that terminates the instances

A real run in a local cloud of its own (SSH hosts without root for `train`, records for the others), observed
by sys.setprofile in all threads, from the verb's first line on. A jump is a function of another file that is
called from a file of the story, once for each calling file. The story is in the rooms STORY:
what the others call among themselves is not followed.
Not counted is what a reader of the calling file need not follow: an attribute that is computed, a record
that is made, what a file does when it is imported, and whoever lets a function run on a thread (`THREADS`).
Files: the verb's own and those that are jumped to. Returns: the jumps to a file that was visited before,
coming back from a call not counted. FOLDER is a checkout; it must use the same Python environment.
"""

import inspect
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

CLOUD = {"train": "--loopback", "up": "--no-hosts", "down": "--no-hosts"}
UP = ["--local", "up", "--nodes", "2", "-y"]
WORDS = {"train": ["train", "--world-size", "2"], "up": UP, "down": ["down", "-y"]}
VERBS = {"train": "job/train.py", "up": "cluster/up.py", "down": "cluster/down.py"}
STORY = ("cluster", "job", "state.py")
"""Where a verb's story is told. Every other room has a subject of its own: each function of one that the
story enters is a jump."""
THREADS = "util/parallel.py"


class Observer:
    """The functions that a verb's story has entered so far, and from which file."""

    def __init__(self, package: str, verb: str) -> None:
        self._package, self._verb = package, verb
        self.jumps: dict[tuple[str, str], None] = {}

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Take one event of sys.setprofile in, and leave at the end of the path."""
        file = self._file(frame)
        if event != "call" or file is None:
            return
        if self._over(frame):
            self.show()
            os._exit(0)
        if frame.f_code.co_name[0] == "<" or self._is_no_call(frame):
            return  # a lambda or a comprehension, read where it stands
        function, caller = frame.f_code.co_qualname, self._caller(frame)
        if not self.jumps and (file, function) != (VERBS[self._verb], self._verb):
            return
        is_followed = caller.partition("/")[0] in STORY and caller != file
        if file != THREADS and (not self.jumps or is_followed):
            self.jumps[caller, f"{file}:{function}"] = None

    def _is_no_call(self, frame: FrameType) -> bool:
        """Tell whether this is a property, a constructor, or the code of a file that is being imported."""
        code, back = frame.f_code, frame.f_back
        if code.co_name in ("__init__", "__post_init__", "__getattr__"):
            return True
        while back is not None:
            if back.f_code.co_name == "_call_with_frames_removed":
                return True
            back = back.f_back
        owner = type(frame.f_locals[code.co_varnames[0]]) if code.co_argcount else None
        found = inspect.getattr_static(owner, code.co_name, None)
        getter = found.fget if isinstance(found, property) else getattr(found, "func", None)
        return getattr(getter, "__code__", None) is code

    def _over(self, frame: FrameType) -> bool:
        if frame.f_code.co_qualname == "Aws.call":
            return self._verb == "up" or frame.f_locals["operation"] == "TerminateInstances"
        messages = frame.f_locals.get("messages") if frame.f_code.co_name == "request" else None
        return bool(messages) and any(b'"do": "launch"' in data for data in messages.values())

    def _file(self, frame: FrameType) -> str | None:
        """Return the file of a function of awsddp, None for any other code."""
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if not is_function or not code.co_filename.startswith(self._package):
            return None
        return code.co_filename.removeprefix(self._package + os.sep)

    def _caller(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None and self._file(back) in (None, THREADS):  # whoever let it run there
            back = back.f_back
        return (back is not None and self._file(back)) or "a thread"

    def show(self) -> None:
        """Print the jumps by file, and the two figures."""
        files: dict[str, list[str]] = {}
        for caller, to in self.jumps:
            file, _, function = to.partition(":")
            files.setdefault(file, []).append(f"{caller} -> {function}")
        for file, entered in files.items():
            print(f"{len(entered):3} {file}: {', '.join(entered)}", file=sys.stderr)
        print(f"{self._verb}: {len(files)} files, {len(self.jumps) - len(files)} returns", flush=True)


def observe(verb: str) -> None:
    """Run the verb in this process until its path is over."""
    import awsddp
    from awsddp.cli.main import main

    path = Observer(str(Path(awsddp.__file__).parent), verb)
    sys.argv = ["awsddp", *WORDS[verb]]
    threading.setprofile(path.profile)
    sys.setprofile(path.profile)
    main()


def main() -> None:
    """Make the local cloud, observe the verb in a process of its own, and end the cloud."""
    verb = sys.argv[1]
    root = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent.parent).resolve()
    with tempfile.TemporaryDirectory(prefix="awsddp-path-") as folder:
        environ = {**os.environ, "AWSDDP_HOME": f"{folder}/home", "PYTHONPATH": str(root)}
        project = Path(folder, "project")
        project.mkdir()

        def run(*words: str, out: int | None = subprocess.DEVNULL) -> None:
            subprocess.run([sys.executable, *words], cwd=project, env=environ, check=True, stdout=out)

        run("-m", "awsddp", "-q", "local", "start", CLOUD[verb])
        try:
            if verb != "up":
                run("-m", "awsddp", "-q", *UP)
            run(str(Path(__file__).resolve()), "--observe", verb, out=None)
        finally:
            run("-m", "awsddp", "-q", "local", "stop")


if __name__ == "__main__":
    observe(sys.argv[2]) if sys.argv[1] == "--observe" else main()
