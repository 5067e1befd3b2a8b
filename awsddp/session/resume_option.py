"""Find a training script's option for the checkpoint to resume from."""

import re
from pathlib import Path

_RESUMES = re.compile(r"[\"'](--(?:resume|restore|load[-_](?:checkpoint|ckpt))(?:[-_]\w[\w-]*)?)[\"']")
_IS_FLAG = re.compile("store_true|store_false|BooleanOptional|is_flag")
_CALL = 300
"""The maximum number of characters read from the call that declares an option."""


def resume_option(workdir: Path, script: str) -> str | None:
    """Return a script's or module's checkpoint option, or "" if the script reads $AWSDDP_RESUME itself.

    Returns None if the script's text contains neither.
    """
    module = Path(*script.split("."))
    files = (Path(script), module.with_suffix(".py"), module / "__main__.py")
    path = next((workdir / file for file in files if (workdir / file).is_file()), None)
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path is not None else ""
    except OSError:
        text = ""
    if "AWSDDP_RESUME" in text:
        return ""
    for match in _RESUMES.finditer(text):
        if not _IS_FLAG.search(text[match.end() : match.end() + _CALL].partition("add_argument")[0]):
            return match[1]
    return "--resume_from_checkpoint" if "HfArgumentParser" in text and "TrainingArguments" in text else None
