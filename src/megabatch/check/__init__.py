"""`megabatch check`: is everything exact on this machine, and how fast is it? Built on public names only.

`cases` has what is computed, `exactness` compares it, `gpu` watches it, `command` reports. `megabatch.bench` measures.
"""
