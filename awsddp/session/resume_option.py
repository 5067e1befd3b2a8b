"""How a script takes the checkpoint to continue from."""

import re
from pathlib import Path

_RESUMES = re.compile(r"[\"'](--(?:resume|restore|load[-_](?:checkpoint|ckpt))(?:[-_]\w[\w-]*)?)[\"']")
_IS_FLAG = re.compile("store_true|store_false|BooleanOptional|is_flag")
_CALL = 300
"""How many characters of the call that declares an option are read."""


def resume_option(workdir: Path, script: str) -> str | None:
    """Return the option of a script or module that takes a checkpoint, "" if it reads $AWSDDP_RESUME itself.

    None where its text shows neither.
    """
    module = Path(*script.split("."))
    files = (Path(script), module.with_suffix(".py"), module / "__main__.py")
    path = next((workdir / one for one in files if (workdir / one).is_file()), None)
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
    except OSError:
        text = ""
    if "AWSDDP_RESUME" in text:
        return ""
    for found in _RESUMES.finditer(text):
        if not _IS_FLAG.search(text[found.end() : found.end() + _CALL].partition("add_argument")[0]):
            return found[1]
    return "--resume_from_checkpoint" if "HfArgumentParser" in text and "TrainingArguments" in text else None
