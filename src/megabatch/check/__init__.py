"""`megabatch check`: is everything exact on this machine, and how fast is it? Built on public names only.

In reading order: `command` says what is done, `cases` what is computed, `exactness` holds it against
`megabatch.reference`, `speed` measures with the instruments of `megabatch.bench`, `report` is the output. For a GPU:
`calls` are one option at a time, `host_reads`, `launches` and `graphs` a section each, and `findings` what they report.
"""
