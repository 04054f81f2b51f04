"""Three acts: a batch that grows until memory ends, towers that learn, one large step."""
