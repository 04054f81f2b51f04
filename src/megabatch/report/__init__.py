"""The page of one or more training runs: a single HTML file that needs no network.

runs.py      what a run has left in its folder
figures.py   curves, bars and error bars, as plotly draws them
summary.py   tables: metrics of the last step, settings, skipped samples, environment
page.py      all of it as HTML; page.css and page.js go into it

Nothing here knows the trainer: `megabatch report` and `megabatch train --report` are commands of train/. Its
report.py is the log of a run, and bench/report.py prints tables of benchmarks.
"""
