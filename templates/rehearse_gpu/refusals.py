"""What needs a GPU and cannot be pretended."""

import functools
import linecache
import os
import traceback
from pathlib import Path

import torch


def refusal(call):
    """Why a call is refused, and which line of the script it came from."""
    return (
        f"rehearsal: {call} needs a true GPU and cannot be pretended{_line()}. Leave it out of the "
        "rehearsal: there torch.cuda.get_device_name() ends with (rehearsed); or rehearse on the CPU: "
        "-o local.gpus=off"
    )


def _line():
    """The innermost line that is not of a package: " (train.py, line 3: loss.backward())"."""
    folders = Path(torch.__file__).parent.parent, Path(os.__file__).parent, Path(__file__).parent
    for frame, number in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename)
        if file.exists() and not any(map(file.is_relative_to, folders)):
            return f" ({file}, line {number}: {linecache.getline(str(file), number).strip()})"
    return ""


def refuse(owner, name):
    """Refuse to call a function, or to make what is of a class: who only asks a class is answered."""
    found, call = getattr(owner, name), f"{owner.__name__}.{name}"

    def refused(*args, **named):
        raise RuntimeError(refusal(call))

    if isinstance(found, type):
        found.__new__ = refused
    else:
        setattr(owner, name, functools.wraps(found)(refused))
