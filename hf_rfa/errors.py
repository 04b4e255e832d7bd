"""The error that the tools raise for input they cannot use."""


class InputError(ValueError):
    """A checkpoint, a text, a destination or an option cannot be used; the message says what to do next."""
