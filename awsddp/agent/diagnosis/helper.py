"""Serve requests for a rank's stacks.

This module runs in each rank before the user's program, as `sitecustomize`. A thread waits for requests on a
named pipe and writes the responses. The thread needs the GIL; if the GIL is never released, the SIGUSR2
handler can still write the stacks. The helper must not affect the program: it imports only modules that the
interpreter has loaded, ignores its own failures, and then imports the next sitecustomize.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import faulthandler
import os
import sys


def _start() -> None:
    """Serve requests about this process. A forked child, such as a loader worker, has files of its own."""
    name = "{}/{}".format(os.environ["AWSDDP_STACKS_DIR"], os.getpid())
    try:
        faulthandler.register(_signal.SIGUSR2, file=open(f"{name}.signal", "w"), all_threads=True)  # noqa: SIM115, PTH123 (open for good; pathlib is slow to import)
        os.mkfifo(f"{name}.request", 0o600)
    except FileExistsError:  # the pipe of an earlier process that had this pid
        pass
    except (OSError, RuntimeError, ValueError):
        return
    _thread.start_new_thread(_serve, (name,))


def _serve(name: str) -> None:
    while True:
        try:
            request = os.open(f"{name}.request", os.O_RDONLY)  # blocks until a request arrives
            while os.read(request, 64):
                pass
            os.close(request)
            _answer(name)
        except OSError:  # the job's folder is gone, or its disk is full
            return


def _answer(name: str) -> None:
    """Write all threads' stacks, a line "--", the rank in the default group, and torch's records."""
    with open(f"{name}.part", "w") as file:  # noqa: PTH123
        faulthandler.dump_traceback(file, all_threads=True)
        file.write(f"--\n{_rank()}\n")
        c10d = sys.modules.get("torch._C._distributed_c10d")
        # Stack traces are left out, because torch would hold the GIL for seconds to name the C++ frames.
        for function in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            if hasattr(c10d, function):
                file.write(_decode(getattr(c10d, function)()) + "\n")
    os.replace(f"{name}.part", f"{name}.answer")  # noqa: PTH105


def _rank() -> str:
    distributed = sys.modules.get("torch.distributed")
    try:
        return str(distributed.get_rank()) if distributed and distributed.is_initialized() else ""
    except Exception:
        return ""


def _decode(trace: object) -> str:
    return trace.decode() if isinstance(trace, bytes) else str(trace)


def _import_next_sitecustomize() -> None:
    """Import the user's sitecustomize that this module hides, if there is one."""
    this_module = sys.modules.pop("sitecustomize")
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]  # noqa: PTH120
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this_module  # Python looks up this module at the end of the import


if __name__ == "sitecustomize":
    if "AWSDDP_STACKS_DIR" in os.environ:
        _start()
        os.register_at_fork(after_in_child=_start)
    _import_next_sitecustomize()
