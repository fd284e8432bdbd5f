"""`neaptide report`: the directory that a run of `neap train` left, as one page of HTML.

    neaptide report runs/mine
    neaptide report runs/mine -o mine.html

The page holds everything it needs, plotly's JavaScript included, and opens without a network. It shows what the run
measured: memory over time by kind, what the peak was made of, planned against measured; the streams with copies and
waits; late reloads and exposed waits; loss, gradient norm and tokens per second; and the run file. Timelines and memory
over time need the trace of the run (log.trace: true). A run that is still going, or was killed, can be read, too.
"""

import argparse
from pathlib import Path

from neaptide._command import NAME, CommandError
from neaptide.report.page import page_of
from neaptide.report.run_directory import read_run_directory

__all__ = ["report"]


def report(run_directory: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page about a run directory and returns where it is.

    Args:
        run_directory: what `neap train` left in log.dir.
        out: file to write; None: report.html in the run directory.

    Raises:
        CommandError: the directory is damaged or not of a run, or the page cannot be written.
    """
    run_directory = Path(run_directory)
    run = read_run_directory(run_directory)
    out = Path(out) if out else run_directory / "report.html"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page_of(run), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{out}: cannot be written; {error}") from error
    return out


def main(arguments=None):
    """`neaptide report`."""
    parser = argparse.ArgumentParser(
        prog=f"{NAME} report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR", help="log.dir of a run of neap train")
    parser.add_argument("-o", "--out", type=Path, help="file to write; default: report.html in the run directory")
    options = parser.parse_args(arguments)
    print(report(options.run_directory, options.out))
