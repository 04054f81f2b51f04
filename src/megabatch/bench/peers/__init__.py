"""Every tool of the field on the same inputs."""
