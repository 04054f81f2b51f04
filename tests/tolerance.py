"""The tolerances of the tests are those of `megabatch check` and of the benchmarks."""

from megabatch.bench.tolerance import HALF_PRECISION, eps, logit_error, slack, summed_in

__all__ = ["HALF_PRECISION", "eps", "logit_error", "slack", "summed_in"]
