"""What the user brings: Task, model, optimizer, metrics; building, evaluating and blaming them."""
