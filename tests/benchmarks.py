"""`megabatch bench` as the tests call it."""

from megabatch import cli


def main(words: list[str]) -> int:
    return cli.main(["bench", *words])
