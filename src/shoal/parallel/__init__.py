"""How replicas hold and agree on one set of weights."""
