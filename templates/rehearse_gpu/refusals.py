"""Errors for calls that need a GPU and cannot be simulated."""

import functools
import linecache
import os
import traceback
from pathlib import Path

import torch


def refusal_text(call):
    """Return the error text for a call; the text includes the script line that made the call."""
    return (
        f"rehearsal: {call} needs a real GPU and cannot be simulated{_calling_line()}. Skip this call if "
        "torch.cuda.get_device_name() ends with (rehearsed), or rehearse without GPUs: -o local.gpus=off"
    )


def _calling_line():
    """Return the innermost line outside packages, such as " (train.py, line 3: loss.backward())"."""
    folders = Path(torch.__file__).parent.parent, Path(os.__file__).parent, Path(__file__).parent
    for frame, number in traceback.walk_stack(None):
        file = Path(frame.f_code.co_filename)
        if file.exists() and not any(map(file.is_relative_to, folders)):
            return f" ({file}, line {number}: {linecache.getline(str(file), number).strip()})"
    return ""


def refuse(owner, name):
    """Make calls to a function or a class raise an error. The class itself stays usable in isinstance()."""
    original, call = getattr(owner, name), f"{owner.__name__}.{name}"

    def refused(*args, **kwargs):
        raise RuntimeError(refusal_text(call))

    if isinstance(original, type):
        original.__new__ = refused
    else:
        setattr(owner, name, functools.wraps(original)(refused))
