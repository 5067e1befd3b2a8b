"""Count the files that a reader of a verb's implementation visits, and the returns to a visited file.

    python tools/call_path.py train [FOLDER]    # to the launch request of the first rank
    python tools/call_path.py up [FOLDER]       # to the first call to AWS
    python tools/call_path.py down [FOLDER]     # to the call that terminates the instances

The verb runs in a separate local cloud (SSH hosts without root for `train`, only the EC2 API for the others).
sys.setprofile observes all threads from the verb's first line on. A jump is a call from a file in STORY to a
function of another file, counted once per calling file. Calls between other files are not counted, nor are
properties, constructors, imports, or calls of `THREADS`, which runs functions in threads. The files are the
verb's own file and the targets of the jumps. The returns are the jumps to a file that was visited before.
FOLDER is a checkout, which must use the same Python environment.
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
"""The packages that implement the verbs, and the modules that are read with them."""
THREADS = "util/parallel.py"


class Observer:
    """Collects the jumps of a verb: the calling file, and the file and name of the called function."""

    def __init__(self, package: str, verb: str) -> None:
        self._package, self._verb = package, verb
        self.jumps: dict[tuple[str, str], None] = {}

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Handle one event of sys.setprofile; at the end of the path, print the result and exit."""
        file = self._file(frame)
        if event != "call" or file is None:
            return
        if self._is_end(frame):
            self.show()
            os._exit(0)
        if frame.f_code.co_name[0] == "<" or self._is_ignored(frame):
            return  # a lambda or a comprehension is read at its definition
        function, caller = frame.f_code.co_qualname, self._caller(frame)
        if not self.jumps and (file, function) != (VERBS[self._verb], self._verb):
            return
        is_followed = caller.partition("/")[0] in STORY and caller != file
        if file != THREADS and (not self.jumps or is_followed):
            self.jumps[caller, f"{file}:{function}"] = None

    def _is_ignored(self, frame: FrameType) -> bool:
        """Return True for a property, a constructor, and the code of a module that is being imported."""
        code, back = frame.f_code, frame.f_back
        if code.co_name in ("__init__", "__post_init__", "__getattr__"):
            return True
        while back is not None:
            if back.f_code.co_name == "_call_with_frames_removed":
                return True
            back = back.f_back
        owner = type(frame.f_locals[code.co_varnames[0]]) if code.co_argcount else None
        attribute = inspect.getattr_static(owner, code.co_name, None)
        getter = attribute.fget if isinstance(attribute, property) else getattr(attribute, "func", None)
        return getattr(getter, "__code__", None) is code

    def _is_end(self, frame: FrameType) -> bool:
        """Return True if the frame sends the verb's decisive request: a call to AWS, or a rank's launch."""
        if frame.f_code.co_qualname == "AwsClient.call":
            return self._verb == "up" or frame.f_locals["operation"] == "TerminateInstances"
        messages = frame.f_locals.get("messages") if frame.f_code.co_name == "request" else None
        return bool(messages) and any(b'"do": "launch"' in data for data in messages.values())

    def _file(self, frame: FrameType) -> str | None:
        """Return the file of a function of awsddp, or None for other code."""
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if not is_function or not code.co_filename.startswith(self._package):
            return None
        return code.co_filename.removeprefix(self._package + os.sep)

    def _caller(self, frame: FrameType) -> str:
        back = frame.f_back
        while back is not None and self._file(back) in (None, THREADS):  # the caller of the thread helper
            back = back.f_back
        return (back is not None and self._file(back)) or "a thread"

    def show(self) -> None:
        """Print the jumps by file, and the numbers of files and of returns."""
        files: dict[str, list[str]] = {}
        for caller, target in self.jumps:
            file, _, function = target.partition(":")
            files.setdefault(file, []).append(f"{caller} -> {function}")
        for file, jumps in files.items():
            print(f"{len(jumps):3} {file}: {', '.join(jumps)}", file=sys.stderr)
        print(f"{self._verb}: {len(files)} files, {len(self.jumps) - len(files)} returns", flush=True)


def observe(verb: str) -> None:
    """Run the verb in this process until it sends its decisive request."""
    import awsddp
    from awsddp.cli.main import main

    path = Observer(str(Path(awsddp.__file__).parent), verb)
    sys.argv = ["awsddp", *WORDS[verb]]
    threading.setprofile(path.profile)
    sys.setprofile(path.profile)
    main()


def main() -> None:
    """Start a local cloud, observe the verb in a child process, and stop the cloud."""
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
