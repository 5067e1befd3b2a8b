"""A replacement for the aws command line and its plug-in: same arguments; it forwards bytes to a port.

As SSM's agent does, it connects from the node itself: in the network namespace that `targets.json` names.
"""

import json
import os
import sys
from pathlib import Path

AWS = """\
#!{python} -I
import ctypes, json, os, socket, sys, threading
folder = {folder!r}
words = sys.argv[1:]
with open(folder + "/calls", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
given = dict(zip(words[2::2], words[3::2]))
targets = json.load(open(folder + "/targets.json"))
refusal = targets.get("refusal", "An error occurred (TargetNotConnected) when calling the StartSession "
    "operation: " + given["--target"] + " is not connected.")
if words[:2] != ["ssm", "start-session"] or given["--target"] not in targets:
    sys.exit("\\n" + refusal)
host, namespace = targets[given["--target"]]
if namespace:
    entered = ctypes.CDLL(None).setns(os.open("/run/netns/" + namespace, os.O_RDONLY), 0)
    assert entered == 0, namespace
line = socket.create_connection((host, int(given["--parameters"].removeprefix("portNumber="))))
def copy_in():
    while data := os.read(0, 65536):
        line.sendall(data)
    line.shutdown(socket.SHUT_WR)
threading.Thread(target=copy_in, daemon=True).start()
while data := line.recv(65536):
    while data:
        data = data[os.write(1, data):]
"""


class FakeAwsCli:
    """The programs in a folder for the PATH, and the command lines of their calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        (self.bin / "aws").write_text(AWS.format(python=sys.executable, folder=os.fspath(folder)))
        (self.bin / "session-manager-plugin").write_text("#!/bin/sh\n")
        for program in self.bin.iterdir():
            program.chmod(0o755)
        self.set_targets({})

    def set_targets(self, targets: dict[str, tuple[str, str]], **refusal: str) -> None:
        """Set the instances that sessions reach: (address, namespace to connect from, "" for none) by id."""
        new = self.folder / "targets.new"
        new.write_text(json.dumps({**targets, **refusal}))
        new.replace(self.folder / "targets.json")

    @property
    def calls(self) -> list[list[str]]:
        """Every command line so far, without the program."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
