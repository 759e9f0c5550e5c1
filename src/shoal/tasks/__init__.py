"""The user's parts of a job (task, model, optimizer, metrics): building, evaluating and reporting their errors."""
