"""How a worker holds weights and makes one committed step with the others."""
