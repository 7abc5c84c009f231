"""Commands are called as the tests of the command line call them."""

from tests.cli.conftest import disco

__all__ = ["disco"]
