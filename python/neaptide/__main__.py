"""`neaptide`, also as `python -m neaptide`: tools for what `neap` reads and leaves.

Neither command needs the compiled extension.
"""

import argparse
import importlib
import sys

from neaptide._command import NAME, USER_ERROR, CommandError

COMMANDS = {
    "tokenize": "turn texts into a file of tokens for neap train",
    "report": "make a page of HTML of the directory that a run left",
}


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Tools for what neap reads and leaves.",
        epilog="commands:\n" + "\n".join(f"  {name:<10} {does}" for name, does in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cmake-prefix-path",
        action="store_true",
        help="print the folder where find_package(neap) looks",
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, help="neaptide COMMAND --help says more")
    options = parser.parse_args(arguments)
    if not options.cmake_prefix_path:
        parser.error(f"expected a command: {', '.join(COMMANDS)}; or --cmake-prefix-path")
    return options


def module_of(command):
    """Imported when it is asked for: what a command needs takes time, and other commands do without."""
    try:
        return importlib.import_module(f"{__package__}.{command}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("neaptide"):
            raise
        missing = error.name.partition(".")[0]
        raise CommandError(f"{NAME} {command} needs {missing}, which is not there: pip install {missing}") from error


def prefix_path():
    try:
        return importlib.import_module(f"{__package__}._paths").cmake_prefix_path()
    except FileNotFoundError as error:
        raise CommandError(str(error).removeprefix(f"{NAME}: ")) from error


def main(arguments=None):
    """Runs the command line; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments and arguments[0] in COMMANDS:
            module_of(arguments[0]).main(arguments[1:])
        elif parse(arguments).cmake_prefix_path:
            print(prefix_path())
    except CommandError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
