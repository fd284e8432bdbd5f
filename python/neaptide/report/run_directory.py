"""What `neap train` left in a directory, read whole and checked.

Files that a run leaves in any case have to be there and whole; what the run file did not ask for may be missing. Of
several ranks rank 0 alone leaves files.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from neaptide._command import CommandError
from neaptide.report.trace import Trace

NEEDED_IN_A_STEP = ("step", "loss", "grad_norm", "tokens_per_s", "step_ms")


@dataclass
class RunDirectory:
    path: Path
    config_text: str
    config: dict  # section → key → value as it was written
    steps: list  # the objects of metrics.jsonl
    summary: dict | None  # none: the run has not ended, or was killed
    trace: Trace | None  # none: log.trace was off, or the run has not ended
    files: list  # (name, bytes)

    @property
    def name(self):
        return (self.summary or {}).get("name") or self.path.resolve().name

    @property
    def status(self):
        return self.summary["status"] if self.summary else "unfinished"


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: cannot be read; {error}") from error


def parse_config(text):
    """The two levels of a config.yaml that a run has written."""
    config, section = {}, {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(":")
        if not line.startswith(" "):
            section = config.setdefault(key, {})
        else:
            section[key] = value.strip().strip('"')
    return config


def parse_steps(path):
    text = read_text(path)
    if text and not text.endswith("\n"):
        number = text.count("\n") + 1
        raise CommandError(
            f"{path}:{number}: truncated: the last line has no end, as a killed run may leave it; delete that line, "
            "or go on with the run (checkpoint.resume)"
        )
    steps = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            step = json.loads(line)
        except ValueError as error:
            raise CommandError(f"{path}:{number}: expected a JSON object; {error}") from error
        missing = [key for key in NEEDED_IN_A_STEP if not isinstance(step, dict) or key not in step]
        if missing:
            raise CommandError(f"{path}:{number}: expected a step of neap train; it has no {', '.join(missing)}")
        steps.append(step)
    return steps


def parse_summary(path):
    if not path.exists():
        return None
    try:
        summary = json.loads(read_text(path))
    except ValueError as error:
        raise CommandError(f"{path}: expected JSON; {error}; is it truncated?") from error
    if not isinstance(summary, dict) or "status" not in summary:
        raise CommandError(f"{path}: expected the summary of a run of neap train; it has no status")
    return summary


def parse_trace(path, expected):
    if path.exists():
        return Trace.read(path)
    if expected:
        raise CommandError(f"{path}: missing, though log.trace is true and the run has ended; copy the whole directory")
    return None


def read_run_directory(path):
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CommandError(f"expected the directory of a run of neap train; {path} {what}")
    files = sorted(entry for entry in path.iterdir())
    for name in "config.yaml", "metrics.jsonl":
        if not (path / name).exists():
            found = ", ".join(entry.name for entry in files[:6]) or "nothing"
            raise CommandError(
                f"expected the directory of a run of neap train, with config.yaml and metrics.jsonl; {path} has no "
                f"{name}; found: {found}{', …' if len(files) > 6 else ''}"
            )
    config_text = read_text(path / "config.yaml")
    config = parse_config(config_text)
    if not {"model", "train", "log"} <= config.keys():
        raise CommandError(f"{path / 'config.yaml'}: expected the run file of neap train, with model, train and log")
    summary = parse_summary(path / "summary.json")
    expected = summary is not None and config["log"].get("trace") == "true"
    return RunDirectory(
        path=path,
        config_text=config_text,
        config=config,
        steps=parse_steps(path / "metrics.jsonl"),
        summary=summary,
        trace=parse_trace(path / "trace.json", expected),
        files=[(entry.name + ("/" if entry.is_dir() else ""), entry.stat().st_size) for entry in files],
    )
