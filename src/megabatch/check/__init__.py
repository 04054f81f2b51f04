"""`megabatch check`: is everything exact on this machine, and how fast is it? Built on public names only.

`command` says what is done, `cases` what is computed, `exactness` compares it with `megabatch.reference`, `gpu`
examines what only a GPU shows, `report` is what is printed. Speed is measured by the contest of `megabatch.bench`.
"""
