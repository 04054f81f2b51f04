"""The GPU kernels compiled for GPUs that are not here, looked at, and a prediction of their speed."""
