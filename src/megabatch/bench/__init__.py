"""Measuring: `megabatch bench` and a benchmark by name. Built on public names, but for `step`, which trains.

`trial` is the contest that all of them hold: present, fits, right, weigh, race. `contenders` is who takes part and
`cases` what losses are measured on; `chunked` and `step` bring contenders and cases of their own. `measure` has the
instruments, `processes` the ranks, `results` what is known of a contender, `session` the run from first line to last
file. One file for each benchmark: its flags and its table. In reading order: cases, contenders, trial, loss.
"""
