"""The cost model of the planner: measurements go in, predictions, a choice and reasons come out."""
