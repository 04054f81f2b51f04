"""Measuring: `megabatch bench` and a benchmark by name. Built on public names, except `step`, which trains.

`trial` has the steps that all of them share: installed, fits, right, memory, time. `contenders` has the implementations
and `cases` their inputs; `chunked`, `step` and `data` have their own. `measure` has the instruments, `processes` the
ranks, `results` what is known of a contender, `session` the run from first line to last file. One file for each
benchmark: its flags and its table. In reading order: cases, contenders, trial, loss.
"""
