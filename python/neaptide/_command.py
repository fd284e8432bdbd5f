"""What the subcommands of `neaptide` share."""

NAME = "neaptide"
USER_ERROR = 2  # exit code of a mistake in the command or its input, as of `neap`


class CommandError(Exception):
    """A mistake that the reader of the message can mend."""
