"""Measuring: `python -m megabatch.bench loss` and `python -m megabatch.bench demo`. Built on public names only.

In reading order: `cases` says what is measured, `contenders` who is measured, `rivals` is what they compute, `trial` is
what one contender goes through, `measure` and `processes` are the instruments, `report` the output; `loss` and `demo`
are the two commands.
"""
