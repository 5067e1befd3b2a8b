"""Logs of failed ranks, as Python and torch write them."""

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'


def exception_log(text: str) -> str:
    """Return the log of a rank that ended with an exception, as torch prints it in a process group."""
    return "[rank1]: " + (TRACEBACK + text).replace("\n", "\n[rank1]: ") + "\n"


GLOO = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
