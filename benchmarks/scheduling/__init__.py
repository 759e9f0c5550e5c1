"""A simulator of clusters on published workloads, published policies to check it, and the policy of `shoal.plan`."""
