"""The tolerances of the tests are those of `megabatch check` and of the benchmarks."""

from megabatch.bench.tolerance import HALVES, eps, logit_error, slack, summed_in

__all__ = ["HALVES", "eps", "logit_error", "slack", "summed_in"]
