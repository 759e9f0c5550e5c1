"""How long starting, losing and replacing a worker takes with each engine."""
