"""Workers without the run's directory: how they are started, and what they get and send through the driver."""
