"""A queue for several machines: its port, those who ask there, and the machines that offer their cores."""
