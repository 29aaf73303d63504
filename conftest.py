"""The option of the tests, which pytest finds here for a file in any folder below."""


def pytest_addoption(parser):
    """Called by pytest before it reads its command line."""
    parser.addoption(
        "--map", action="append", default=[], metavar="FILE",
        help="run only the tests of the feature maps that this file registers",
    )  # fmt: skip
