"""`megabatch check`: is everything exact on this machine, and how fast is it? Built on public names only.

In reading order: `command` says what is done, `cases` what is computed, `exactness` holds it against
`megabatch.reference`, `speed` measures with the instruments of `megabatch.bench`, `world` is the processes that
check together, `report` the output.
"""
