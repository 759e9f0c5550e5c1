"""What the workers of a view do together: transport, groups, ordered all-reduce, residuals, state transfer."""
