"""A search: the decisions of `plan.search` become runs, and their results go into one journal."""
