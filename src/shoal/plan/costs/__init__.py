"""What a way of running a job would cost, and which to take: measurements go in, predictions and reasons come out."""
